from setuptools import find_packages, setup

# kernels/ and offload/ are installed as `triforce_kernels` and `triforce_offload`: other packages
# have the bare names. transformers imports Hugging Face's `kernels`, for one.
FOLDERS = {"triforce_kernels": "kernels", "triforce_offload": "offload"}

setup(
    packages=[
        *find_packages(include=["triforce_core", "triforce_core.*"]),
        *FOLDERS,
        *(
            f"{name}.{package}"
            for name, folder in FOLDERS.items()
            for package in find_packages(folder)
        ),
    ],
    package_dir=FOLDERS,
    package_data={
        "triforce_offload.machine": ["data/*.toml"],
        "triforce_core.server": ["page.html"],
    },
)
