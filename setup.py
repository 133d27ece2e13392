from setuptools import setup

# The folder kernels/ is installed as `triforce_kernels`: `kernels` is the import name of a Hugging
# Face package that transformers imports, and the two must live side by side.
setup(
    packages=["offload", "offload.checkpoint", "triforce_core", "triforce_kernels"],
    package_dir={"triforce_kernels": "kernels"},
    package_data={"offload": ["data/*.toml"]},
)
