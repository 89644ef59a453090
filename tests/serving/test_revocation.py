"""Certificates that are revoked while a server runs: for the next connection, and for those that are open."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from aero_compile.errors import InputError, PartyError
from aero_compile.runtime import TLSConfig
from aero_compile.runtime.hosts.certificate_changes import revoke_certificates
from aero_compile.runtime.hosts.certificates import make_certificates
from aero_compile.serving.client import connect
from tests.support.certificates import made_config
from tests.support.service import Bare, Running, is_served, serving, tiny_offer

pytest.importorskip("spu")
pytest.importorskip("cryptography")

STATED_SECONDS = 5.0
"""Within which the documents say that a session of a revoked certificate has ended."""


@pytest.fixture(scope="module")
def offer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_offer(tmp_path_factory.mktemp("offer"))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_certificates(tmp_path / "keys", ["127.0.0.1"], ["alice", "bob"])
    return tmp_path / "keys"


def unchecked(keys: Path, name: str) -> TLSConfig:
    """A client that does not look at the list itself."""
    return made_config(keys, name, listed=False)


@pytest.fixture
def running(offer: Path, keys: Path) -> Iterator[Running]:
    with serving(offer, made_config(keys, "server")) as found:
        yield found


def refused(running: Running, why: str) -> bool:
    until = time.monotonic() + 5
    while not any(why in event.get("why", "") for event in running.log):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_the_next_connection_is_refused_without_a_restart(running: Running, keys: Path) -> None:
    assert is_served(running, unchecked(keys, "alice"))
    revoke_certificates(keys, ["alice"])
    with Bare(running.address, unchecked(keys, "alice")) as caller:
        assert caller.greet() is None
    assert refused(running, "its certificate is refused: certificate revoked")
    with pytest.raises(InputError, match="certificate revoked"):
        connect(running.address, tls=made_config(keys, "alice"), protocol="semi2k")
    assert is_served(running, unchecked(keys, "bob"))


def test_open_connections_of_a_revoked_certificate_end_and_others_stay(running: Running, keys: Path) -> None:
    with Bare(running.address, unchecked(keys, "alice")) as alice, Bare(running.address, unchecked(keys, "bob")) as bob:
        assert alice.greet()["kind"] == bob.greet()["kind"] == "offer"
        revoke_certificates(keys, ["alice"])
        started = time.monotonic()
        said = alice.hear()
        assert (said["kind"], said["reason"]) == ("refused", "revoked")
        assert alice.hear() is None
        assert time.monotonic() - started < STATED_SECONDS
        left = running.events("left", 1)
        assert [(event["client"], event["outcome"]) for event in left] == [("alice", "revoked")]
        bob.say({"kind": "fetch", "program": running.server._offered.forwards[0].facts.digest, "part": "program"})
        assert bob.hear()["kind"] == "content"


@pytest.mark.parametrize("damage", ["missing", "junk"])
def test_without_a_list_nobody_new_is_let_in_and_nobody_is_sent_away(running: Running, keys: Path, damage: str) -> None:
    place = keys / "revoked.pem"
    whole = place.read_bytes()
    with Bare(running.address, unchecked(keys, "bob")) as bob:
        assert bob.greet()["kind"] == "offer"
        place.unlink() if damage == "missing" else place.write_bytes(b"junk")
        with contextlib.suppress(OSError), Bare(running.address, unchecked(keys, "alice")) as alice:
            assert alice.greet() is None
        assert refused(running, "revoked.pem: ")
        assert running.events("unreadable", 1)
        place.write_bytes(whole)
        assert is_served(running, unchecked(keys, "alice"))
        bob.say({"kind": "run", "program": "ab" * 32})
        assert "this server has no program" in bob.hear()["message"]


@pytest.mark.parametrize("name", ["alice", "server"])
def test_a_session_that_runs_is_ended_at_both_ends(running: Running, keys: Path, name: str) -> None:
    """Whichever end's certificate is revoked, and whether or not the other is told."""
    with connect(running.address, tls=made_config(keys, "alice"), protocol="semi2k") as connection:
        length = connection.programs[0].length
        assert connection.logits(np.zeros(length, np.int64)).shape[0] == length
        revoke_certificates(keys, [name])
        time.sleep(STATED_SECONDS)
        assert [event["client"] for event in running.events("left", 1)] == ["alice"]
        whose = "client" if name == "alice" else "server"
        with pytest.raises(PartyError, match=f"the {whose}'s certificate: it was revoked"):
            connection.logits(np.zeros(length, np.int64))
