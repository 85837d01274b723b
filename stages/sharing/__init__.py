"""What machines make for one another: outputs of steps and whole artifact directories, on a remote that nobody has to
believe.

    remotes   names and bytes on a file system of fsspec's or on the Hugging Face hub
    records   what a step made, and everything that it was made of
    store     content by its SHA-256, and signed entries about it
    cache     `cache=`: steps that were run before, by whomever
    travel    whole directories: push and pull

On a remote lie `objects/sha256/<2>/<62>`, files by their content; `steps/<2>/<62>/<signer>.json`, what steps made, by
everything that can change it; and `artifacts/<model>/<directory>/<signer>.json`. Entries are envelopes of
`llama_npu2.trust`. Each signer has files of their own, so that nobody replaces what another wrote, and a reader asks
for those of the keys that they trust, without listing anything.
"""
