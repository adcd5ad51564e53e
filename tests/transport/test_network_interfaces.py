"""NCCL's syntax selects network interfaces. An empty text selects the interfaces that lead to other
hosts.
"""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import RendezvousError
from unisono.transport import network_interfaces as interfaces
from unisono.transport.network_interfaces import Interface, choose_interfaces


def host(*names: str) -> list[Interface]:
    return [
        Interface(
            name=name,
            address="127.0.0.1" if name == "lo" else f"192.0.2.{number}",
            loopback=name == "lo",
        )
        for number, name in enumerate(names)
    ]


HOST = host("lo", "eth10", "eth2", "eth0", "ib0", "docker0", "virbr0", "br-1a2b", "eno1")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("", "eno1 eth0 eth2 eth10 ib0"),
        ("eth", "eth0 eth2 eth10"),
        ("ib,eth", "ib0 eth0 eth2 eth10"),
        ("=eth0", "eth0"),
        ("=eth2,ib0,eth1", "eth2 ib0"),
        ("eth1", "eth10"),
        ("=lo", "lo"),
        ("docker", "docker0"),
        ("^docker,lo", "br-1a2b eno1 eth0 eth2 eth10 ib0 virbr0"),
        ("^docker,virbr,br-,e", "ib0"),
        ("^=eth1,eth0,br-", "br-1a2b docker0 eno1 eth2 eth10 ib0 virbr0"),
        ("^e,i,d,v,b", "lo"),
    ],
)
def test_nccl_syntax_chooses_interfaces(spec: str, expected: str) -> None:
    assert [one.name for one in choose_interfaces(spec, HOST)] == expected.split()


def test_rails_limit_the_number_of_interfaces() -> None:
    assert [one.name for one in choose_interfaces("", HOST, rails=2)] == ["eno1", "eth0"]
    assert len(choose_interfaces("", HOST, rails=100)) == 5


def test_loopback_is_the_last_resort() -> None:
    assert [one.name for one in choose_interfaces("", host("lo"))] == ["lo"]
    assert [one.name for one in choose_interfaces("", host("docker0", "lo"))] == ["lo"]


@pytest.mark.parametrize("spec", ["=eth", "wlan", "^lo,e,ib,docker,virbr,br-"])
def test_an_empty_choice_names_the_interfaces_of_the_host(spec: str) -> None:
    with pytest.raises(RendezvousError, match=r"matches no interface .*eth0 \(192\.0\.2\.3\)"):
        choose_interfaces(spec, HOST)
    with pytest.raises(RendezvousError, match="none that is up"):
        choose_interfaces("", [])
    with pytest.raises(
        RendezvousError, match=r"matches no interface of this host, which has docker0"
    ):
        choose_interfaces("", host("docker0"))


@pytest.mark.parametrize("spec", ["^", "=", "^=", "=^eth0", "eth0,,eth1", ",", "eth0,=eth1", "a b"])
def test_an_invalid_text_is_named(spec: str) -> None:
    with pytest.raises(ValueError, match="UNISONO_INTERFACE="):
        choose_interfaces(spec, HOST)


NAMES = st.text("abeth0123-.@", min_size=1, max_size=5)


@given(
    st.lists(NAMES, unique=True, max_size=8),
    st.lists(NAMES, min_size=1, max_size=3),
    st.booleans(),
)
def test_a_list_and_its_exclusion_cover_all_interfaces(
    names: list[str], entries: list[str], exact: bool
) -> None:
    available = host(*names)
    spec = "=" * exact + ",".join(entries)

    def chosen(spec: str) -> set[str]:
        try:
            return {one.name for one in choose_interfaces(spec, available)}
        except RendezvousError:
            return set()

    named, rest = chosen(spec), chosen("^" + spec)
    assert named | rest == set(names) and not named & rest
    fits = str.__eq__ if exact else str.startswith
    assert named == {name for name in names if any(fits(name, entry) for entry in entries)}
    # hosts with the same interfaces choose the same ones, in whatever order the kernel lists them
    if names:
        assert choose_interfaces("", available) == choose_interfaces("", available[::-1])


def test_the_preferred_address_of_an_interface_is_used() -> None:
    prefer = interfaces._preferred
    assert prefer(["fe80::1%eth0", "2001:db8::1", "192.0.2.1", "02:00:00:00:00:01"]) == "192.0.2.1"
    assert prefer(["fe80::1%eth0", "2001:db8::1"]) == "2001:db8::1"
    assert prefer(["169.254.1.1", "192.0.2.1"]) == "192.0.2.1"
    assert prefer(["fe80::1%eth0", "02:00:00:00:00:01"]) is None
    assert prefer(["2001:db8::1", "192.0.2.1"], 6) == "2001:db8::1"
    assert prefer(["192.0.2.1", "fe80::1%eth0"], 6) is None
    assert prefer(["2001:db8::1"], 4) is None


def test_addresses_of_this_host_can_be_listened_on() -> None:
    found = interfaces.available_interfaces()
    assert any(one.loopback and one.address == "127.0.0.1" for one in found)
    for one in found:
        family = socket.AF_INET6 if ":" in one.address else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((one.address, 0))
