# Sets UNISONO_KERNEL_SOURCES and their per-file options. No contraction to fused multiply-add:
# results must not depend on the instruction set.
set(_unisono_kernels_dir "${CMAKE_CURRENT_LIST_DIR}")
set(_unisono_kernel_options -ffp-contract=off -fno-trapping-math -fno-math-errno)

set(UNISONO_KERNEL_SOURCES
    "${_unisono_kernels_dir}/dispatch.cc"
    "${_unisono_kernels_dir}/kernels_baseline.cc")
set_source_files_properties("${_unisono_kernels_dir}/kernels_baseline.cc"
    PROPERTIES COMPILE_OPTIONS "${_unisono_kernel_options}")

if(UNISONO_FUZZ)  # it is to find ways through all else: one instruction set, and that not watched
    set_source_files_properties("${_unisono_kernels_dir}/kernels_baseline.cc" PROPERTIES
        COMPILE_OPTIONS "${_unisono_kernel_options};-O1;-fno-sanitize=fuzzer-no-link,undefined")
    set_source_files_properties("${_unisono_kernels_dir}/dispatch.cc" PROPERTIES
        COMPILE_DEFINITIONS UNISONO_BASELINE_ONLY)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
    set(_unisono_avx2 -mavx2 -mf16c)
    # GCC 12 warns about its own AVX-512 header.
    set(_unisono_avx512 ${_unisono_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq
        $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized>
        $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    set(_unisono_avx512vbmi ${_unisono_avx512} -mavx512vbmi)
    set(_unisono_avx512bf16 ${_unisono_avx512} -mavx512bf16)
    foreach(_isa IN ITEMS avx2 avx512 avx512vbmi avx512bf16)
        list(APPEND UNISONO_KERNEL_SOURCES "${_unisono_kernels_dir}/kernels_${_isa}.cc")
        set_source_files_properties("${_unisono_kernels_dir}/kernels_${_isa}.cc"
            PROPERTIES COMPILE_OPTIONS "${_unisono_kernel_options};${_unisono_${_isa}}")
    endforeach()
endif()
