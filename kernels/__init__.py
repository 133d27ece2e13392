"""Kernels: each with its PyTorch reference and a launcher that checks its inputs.

Installed as `triforce_kernels` (the folder's own name belongs to a Hugging Face package).
"""
