"""Decides whether files from elsewhere are trusted: marks of own builds, signatures, and the keys that a user trusts.

    settings    the files of a user's trust: a secret, a signing key, the trusted keys
    keys        public keys as text, and the list of trusted ones
    envelopes   signed payloads (DSSE), each for one purpose
    artifacts   whether the native code of an artifact directory may run

Own builds need nothing but the standard library; signatures need `cryptography` (extra `share`).
"""

from llama_npu2.trust.artifacts import (
    LOCAL,
    SIGNATURE,
    allowed,
    check_trusted,
    covered,
    is_marked,
    mark_own,
    signature,
    signed_statement,
    vouching,
)
from llama_npu2.trust.envelopes import Signed, Untrusted, sign, verify
from llama_npu2.trust.keys import PublicKey, add_key, remove_key, trusted_keys
from llama_npu2.trust.settings import is_own_mac, own_mac
