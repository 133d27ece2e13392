from glob import glob

from setuptools import Extension, find_packages, setup

# kernels/ and offload/ are installed as `triforce_kernels` and `triforce_offload`: other packages
# have the bare names. transformers imports Hugging Face's `kernels`, for one.
FOLDERS = {"triforce_kernels": "kernels", "triforce_offload": "offload"}

# The kernels of the processor (docs/kernels.md). Without a C compiler the package installs too, and
# PyTorch computes instead.
HOST = Extension(
    "triforce_kernels.host._host",
    sorted(glob("kernels/host/source/**/*.c", recursive=True)),
    depends=sorted(glob("kernels/host/source/**/*.h", recursive=True)),
    # Sums and products round one after the other, as in the references.
    extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread"],
    libraries=["m"],
    optional=True,
)

setup(
    ext_modules=[HOST],
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
    # The source archive has files that no wheel needs: MANIFEST.in names them.
    include_package_data=False,
    package_data={
        # Their annotations are for type checkers of other programs too.
        "": ["py.typed"],
        "triforce_offload.machine": ["data/*.toml"],
        "triforce_core.server": ["page/*"],
    },
)
