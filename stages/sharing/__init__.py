"""Shares outputs of steps and whole artifact directories between machines, on a remote that need not be trusted.

    remotes   bytes by name, on a file system of fsspec or on the Hugging Face hub
    records   runs of steps: their outputs, and everything that they were made from
    store     content by its SHA-256, and signed entries about it
    cache     `cache=`: outputs of steps that trusted people ran before
    travel    whole directories: push and pull

A remote has `objects/sha256/<2>/<62>`, files by their content; `steps/<2>/<62>/<signer>.json`, runs of steps by a
digest of everything that can change their outputs; and `artifacts/<model>/<directory>/<signer>.json`. Entries are
envelopes of `llama_npu2.trust`. Each signer has files of their own, so that nobody replaces those of another, and a
reader asks for the files of trusted keys without listing anything.
"""
