"""Classes through which other libraries use Unisono. Each module needs the library that it names.

- `ray_collective`: a backend of `ray.util.collective`.
- `torchft_group`: a process group of torchft.
- `vllm_plugin`: vLLM's groups in CPU memory (`vllm_communicator`), and weights from a trainer to
  vLLM's workers (`vllm_weights`). vLLM finds it through an entry point.

Libraries that ask torch for a backend by name need no class: see docs/frameworks.md.
"""

__all__: list[str] = []
