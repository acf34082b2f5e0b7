"""OpenVLA-OFT on stock transformers: one code path for the 7B model and for the compact one.

Modules: `config` (sizes), `processing` (images), `normalisation` (proprioception, actions), `tokenizer`,
`vision`, `language`, `heads`, `model` (the network), `checkpoint` (files), `api` (`OpenVlaOft`, the
backbone). `config`, `processing`, `normalisation` and `tokenizer` need no torch.
"""
