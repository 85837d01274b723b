"""Marks, signatures, and the list of trusted keys."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from llama_npu2 import trust
from llama_npu2.errors import UserError
from llama_npu2.trust import envelopes, settings
from llama_npu2.trust.keys import PublicKey
from tests.conftest import ROOT, Become

MANIFEST = b'{"format": 4}'


def signed(edit: Callable[[dict[str, Any]], object], purpose: str = "entry") -> bytes:
    """What the present user signed, edited."""
    envelope = json.loads(trust.sign(b"payload", purpose))
    edit(envelope)
    return json.dumps(envelope).encode()


def test_envelope_of_a_trusted_key(become: Become) -> None:
    key = become("anna")
    envelope = trust.sign(b"payload", "entry")
    assert trust.verify(envelope, "entry") == trust.Signed(b"payload", key, "you")
    become("ben")
    with pytest.raises(trust.Untrusted, match=f"signed by {re.escape(key.fingerprint)}, whom you do not trust"):
        trust.verify(envelope, "entry")
    trust.add_key(key, "Anna")
    assert trust.verify(envelope, "entry").name == "Anna"


def test_a_removed_key_is_not_trusted_until_it_is_added_again(become: Become) -> None:
    key = become("anna")
    envelope = trust.sign(b"payload", "entry")
    become("ben")
    trust.add_key(key, "Anna")
    assert trust.remove_key("Anna") == (key, "Anna")
    with pytest.raises(trust.Untrusted, match="the key 'Anna' that you removed"):
        trust.verify(envelope, "entry")
    trust.add_key(key, "Anna")
    assert trust.verify(envelope, "entry")


def test_own_key_can_be_removed(become: Become) -> None:
    key = become("anna")
    trust.remove_key(key.fingerprint)
    with pytest.raises(trust.Untrusted):
        trust.verify(trust.sign(b"payload", "entry"), "entry")


@pytest.mark.parametrize("how", ["key", "fingerprint"])
def test_environment(become: Become, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    key = become("anna")
    envelope = trust.sign(b"payload", "entry")
    become("ben")
    monkeypatch.setenv("LLAMA_NPU2_TRUST", f"sha256:{'0' * 64}, {key if how == 'key' else key.fingerprint}")
    assert trust.verify(envelope, "entry").payload == b"payload"
    trust.add_key(key, "Anna")
    trust.remove_key("Anna")
    with pytest.raises(trust.Untrusted):
        trust.verify(envelope, "entry")


def test_an_environment_that_says_nothing(become: Become, monkeypatch: pytest.MonkeyPatch) -> None:
    become("anna")
    monkeypatch.setenv("LLAMA_NPU2_TRUST", "SHA256:x")
    with pytest.raises(UserError, match="LLAMA_NPU2_TRUST: SHA256:x is no fingerprint, key, or sha256: of a manifest"):
        trust.trusted_keys()


def flipped(text: str) -> str:
    raw = bytearray(base64.b64decode(text))
    raw[-1] ^= 1
    return base64.b64encode(raw).decode()


ALTERED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "payload": (lambda e: e.update(payload=flipped(e["payload"])), "was altered"),
    "signature": (lambda e: e["signatures"][0].update(sig=flipped(e["signatures"][0]["sig"])), "was altered"),
    "short signature": (lambda e: e["signatures"][0].update(sig="AAAA"), "was altered"),
    "no signature": (lambda e: e["signatures"][0].update(sig=""), "was altered"),
    "other purpose": (lambda e: e.update(payloadType=envelopes.payload_type("manifest")), "for 'application/vnd"),
    "not base64": (lambda e: e.update(payload="*" + e["payload"]), "what is not base64"),
    "base64 that is not ASCII": (lambda e: e.update(payload="é"), "what is not base64"),
    "two signatures": (lambda e: e["signatures"].append(e["signatures"][0]), "no DSSE envelope"),
    "signatures missing": (lambda e: e.pop("signatures"), "no DSSE envelope"),
    "signature of a wrong type": (lambda e: e["signatures"][0].update(sig=7), "no DSSE envelope"),
    "keyid not a key": (lambda e: e["signatures"][0].update(keyid="you"), "is no Ed25519 key"),
    "key of an other length": (lambda e: e["signatures"][0].update(keyid="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5"), "is no"),
}


@pytest.mark.parametrize("what", ALTERED)
def test_altered_envelopes(become: Become, what: str) -> None:
    become("anna")
    edit, complaint = ALTERED[what]
    with pytest.raises(UserError, match=complaint) as caught:
        trust.verify(signed(edit), "entry")
    assert not isinstance(caught.value, trust.Untrusted)


def test_a_trusted_key_that_did_not_sign(become: Become) -> None:
    anna = become("anna")
    become("ben")
    trust.add_key(anna, "Anna")
    with pytest.raises(UserError, match="was altered"):
        trust.verify(signed(lambda envelope: envelope["signatures"][0].update(keyid=str(anna))), "entry")


@pytest.mark.parametrize("envelope", [b"", b"\xff", b"[]", b"[" * 100_000, b'"' + b" " * (16 << 20) + b'"'])
def test_what_is_no_envelope(become: Become, envelope: bytes) -> None:
    become("anna")
    with pytest.raises(UserError, match="not signed correctly"):
        trust.verify(envelope, "entry")


def test_what_is_signed_tells_purpose_and_payload_apart(become: Become) -> None:
    """A signature of (ab, c) is none of (a, bc)."""
    become("anna")
    assert settings.framed("ab", b"c") != settings.framed("a", b"bc")
    assert settings.framed("a", b"1 b") != settings.framed("a 3 1", b"b")
    assert not settings.is_own_mac(settings.own_mac(b"x", "manifest").encode(), b"x", "receipt")


def test_keys_are_those_of_openssh(become: Become, tmp_path: Path) -> None:
    key = become("anna")
    for text in (f"{key} a comment", str(key).split()[1]):
        assert PublicKey.parse(text) == key
    if program := shutil.which("ssh-keygen"):
        run = subprocess.run([program, "-lf", tmp_path / "anna/signing_key"], capture_output=True, text=True)
        assert key.fingerprint in run.stdout.split()


def test_keys_of_other_types(become: Become, tmp_path: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    text = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    with pytest.raises(ValueError, match="no Ed25519 key"):
        PublicKey.parse(text)
    become("anna")
    held = tmp_path / "anna/signing_key"
    held.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    with pytest.raises(UserError, match="is no Ed25519 key"):
        trust.sign(b"", "entry")
    held.write_text("nonsense")
    with pytest.raises(UserError, match="cannot be read"):
        trust.sign(b"", "entry")


def test_a_private_key_that_was_replaced(become: Become, tmp_path: Path) -> None:
    """Whoever replaces `signing_key` signs with what they put there."""
    become("anna")
    new = ed25519.Ed25519PrivateKey.generate()
    (tmp_path / "anna/signing_key").write_bytes(new.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    assert trust.verify(trust.sign(b"payload", "entry"), "entry").payload == b"payload"


def test_secrets_that_others_can_read(become: Become, tmp_path: Path) -> None:
    become("anna")
    (tmp_path / "anna/signing_key").chmod(0o644)
    with pytest.raises(UserError, match="can be read by others: chmod 600"):
        trust.sign(b"", "entry")


def test_settings_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(settings.DIRECTORY, str(tmp_path / "file/settings"))
    with pytest.raises(UserError, match=r"settings/secret: Not a directory: set LLAMA_NPU2_CONFIG to"):
        settings.own_mac(b"", "manifest")
    monkeypatch.delenv(settings.DIRECTORY)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(settings.os.path, "expanduser", lambda path: path)
    with pytest.raises(UserError, match="no home directory: set LLAMA_NPU2_CONFIG"):
        settings.own_mac(b"", "manifest")


def test_a_damaged_list_of_keys(become: Become, tmp_path: Path) -> None:
    key = become("anna")
    (tmp_path / "anna/trusted_keys").write_text(f"# mine\n\n{key} An na\nssh-rsa AAAA\n")
    with pytest.raises(UserError, match=r"trusted_keys: .* is no Ed25519 key"):
        trust.trusted_keys()
    (tmp_path / "anna/trusted_keys").write_bytes(b"\xff")
    with pytest.raises(UserError, match="is not text"):
        trust.trusted_keys()


@pytest.mark.parametrize("name", ["", "two\nlines", "\x1b[31mred", "right\u202eleft", " padded"])
def test_names_that_cannot_be_shown(become: Become, name: str) -> None:
    with pytest.raises(UserError, match="printable text on one line") as caught:
        trust.add_key(become("anna"), name)
    assert str(caught.value).isprintable()


def test_unknown_names_are_not_removed(become: Become) -> None:
    become("anna")
    with pytest.raises(UserError, match="no trusted key is called Ben"):
        trust.remove_key("Ben")


def test_processes_that_start_together_have_one_secret(tmp_path: Path) -> None:
    script = "from llama_npu2.trust import settings; print(settings.own_mac(b'', ''))"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | {settings.DIRECTORY: str(tmp_path / "new"), "PYTHONPATH": "runtime"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    assert len({process.communicate()[0] for process in started}) == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["secret"]


def statement(manifest: bytes) -> dict[str, Any]:
    digest = {"sha256": hashlib.sha256(manifest).hexdigest()}
    return {"_type": "https://in-toto.io/Statement/v1", "subject": [{"name": "manifest.json", "digest": digest}]}


def test_own_manifests_need_no_key(become: Become, tmp_path: Path) -> None:
    become("anna")
    trust.mark_own(tmp_path, MANIFEST)
    mark = (tmp_path / trust.LOCAL).read_bytes()
    assert trust.allowed(tmp_path, MANIFEST, mark, b"") == "you"
    with pytest.raises(UserError, match="not built by you, and it is not signed"):
        trust.allowed(tmp_path, MANIFEST + b" ", mark, b"")
    become("ben")
    with pytest.raises(UserError, match="not built by you"):
        trust.allowed(tmp_path, MANIFEST, mark, b"")


def test_signed_manifests(become: Become, tmp_path: Path) -> None:
    key = become("anna")
    envelope = trust.signature(MANIFEST, statement(MANIFEST))
    become("ben")
    with pytest.raises(UserError) as caught:
        trust.check_trusted(tmp_path, MANIFEST, b"", envelope, ["elf/host.so", "elf/one.so"])
    for part in (key.fingerprint, "(elf/host.so and 1 more)", f"llama-npu2 trust '{key}'", f"trust {tmp_path} allows"):
        assert part in str(caught.value)
    with pytest.raises(UserError, match=f"--trust=sha256:{hashlib.sha256(MANIFEST).hexdigest()} allows just this$"):
        trust.check_trusted(tmp_path / "one.pyz", MANIFEST, b"", envelope, ["elf/host.so"])
    trust.add_key(key, "Anna")
    trust.check_trusted(tmp_path, MANIFEST, b"", envelope, ["elf/host.so"])
    with pytest.raises(UserError, match="is not about this manifest"):
        trust.check_trusted(tmp_path, MANIFEST + b" ", b"", envelope, ["elf/host.so"])


def test_a_signature_for_the_cache_is_none_of_a_manifest(become: Become, tmp_path: Path) -> None:
    become("anna")
    payload = json.dumps(statement(MANIFEST)).encode()
    with pytest.raises(UserError, match="it is for 'application/vnd"):
        trust.allowed(tmp_path, MANIFEST, b"", trust.sign(payload, "entry"))


def test_a_manifest_named_by_its_digest(become: Become, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    become("anna")
    digest = statement(MANIFEST)["subject"][0]["digest"]["sha256"]
    monkeypatch.setenv("LLAMA_NPU2_TRUST", f"sha256:{digest}")
    assert trust.allowed(tmp_path, MANIFEST, b"", b"")
    with pytest.raises(UserError):
        trust.allowed(tmp_path, MANIFEST + b" ", b"", b"")


def test_a_mark_does_not_follow_links(become: Become, tmp_path: Path) -> None:
    become("anna")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / trust.LOCAL).symlink_to("precious")
    trust.mark_own(tmp_path, MANIFEST)
    assert (tmp_path / "precious").read_text() == "mine"


def test_without_the_package(become: Become, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    become("anna")
    envelope = trust.sign(b"", "entry")
    trust.mark_own(tmp_path, MANIFEST)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(UserError, match="pip install cryptography"):
        trust.verify(envelope, "entry")
    assert trust.allowed(tmp_path, MANIFEST, (tmp_path / trust.LOCAL).read_bytes(), b"") == "you"
