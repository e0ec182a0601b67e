"""Programs beside the package `tlt_megatron`, which starts most of them by the command `tlt`.

This file makes `tools` a regular package: without it, one of the same name in site-packages would
hide it.
"""
