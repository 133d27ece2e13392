from setuptools import find_packages, setup

# The folder kernels/ is installed as `triforce_kernels`: `kernels` is the import name of a Hugging
# Face package that transformers imports, and the two must live side by side.
setup(
    packages=[
        *find_packages(include=["offload", "offload.*", "triforce_core", "triforce_core.*"]),
        "triforce_kernels",
    ],
    package_dir={"triforce_kernels": "kernels"},
    package_data={"offload.machine": ["data/*.toml"], "triforce_core.server": ["page.html"]},
)
