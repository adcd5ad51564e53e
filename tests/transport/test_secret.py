"""The job's secret comes from the variable or, without the variable, from the file. It is never
printed.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from unisono import config
from unisono.transport.secret import job_secret, random_secret


def test_no_setting_means_no_secret() -> None:
    assert job_secret(config.settings({})) is None


def test_the_variable_comes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\x00 of the file\n")
    path.chmod(0o600)
    environ = {"UNISONO_JOB_SECRET_FILE": str(path)}
    assert job_secret(config.settings(environ)) == b"\x00 of the file"
    environ["UNISONO_JOB_SECRET"] = " of the variable\n"
    assert job_secret(config.settings(environ)) == b"of the variable"


def test_an_empty_secret_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b" \n")
    with pytest.raises(ValueError, match="UNISONO_JOB_SECRET is empty"):
        job_secret(config.settings({"UNISONO_JOB_SECRET": ""}))
    with pytest.raises(ValueError, match=f"{path} of UNISONO_JOB_SECRET_FILE is empty"):
        job_secret(config.settings({"UNISONO_JOB_SECRET_FILE": str(path)}))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*No such file"):
        job_secret(config.settings({"UNISONO_JOB_SECRET_FILE": str(tmp_path / "none")}))


def test_a_file_that_all_users_can_read_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secret"
    path.write_text("known to all")
    path.chmod(0o604)
    with caplog.at_level(logging.WARNING, "unisono"):
        assert job_secret(config.settings({"UNISONO_JOB_SECRET_FILE": str(path)}))
    assert "every user of this host can read" in caplog.text


def test_settings_do_not_print_the_secret() -> None:
    assert "swordfish" not in repr(config.settings({"UNISONO_JOB_SECRET": "swordfish"}))


def test_random_secrets_differ() -> None:
    assert len({random_secret() for _ in range(100)}) == 100


def test_ports_are_read() -> None:
    assert config.settings({}).ports is None
    assert config.settings({"UNISONO_PORTS": "20000-20100"}).ports == range(20000, 20101)
    assert config.settings({"UNISONO_PORTS": "7000"}).ports == range(7000, 7001)
    for nonsense in ("", "x", "0-10", "20-10", "1-70000", "1-2-3"):
        with pytest.raises(ValueError, match="UNISONO_PORTS must be such as"):
            config.settings({"UNISONO_PORTS": nonsense})


def test_the_socket_family_has_the_values_of_nccl() -> None:
    assert config.settings({}).ip_version is None
    assert config.settings({"UNISONO_SOCKET_FAMILY": "AF_INET6"}).ip_version == 6
    assert config.settings({"UNISONO_SOCKET_FAMILY": "AF_INET"}).ip_version == 4
    with pytest.raises(ValueError, match="AF_INET or AF_INET6, not 'ipv6'"):
        config.settings({"UNISONO_SOCKET_FAMILY": "ipv6"})


@pytest.mark.parametrize(
    "environ",
    [{"UNISONO_PEER_TIMEOUT_S": "0.5"}, {"UNISONO_STREAMS": "0"}, {"UNISONO_STREAMS": "65"}],
)
def test_invalid_values_are_named(environ: dict[str, str]) -> None:
    (name,) = environ
    with pytest.raises(ValueError, match=name):
        config.settings(environ)
