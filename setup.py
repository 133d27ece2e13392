from concurrent.futures import ThreadPoolExecutor
from glob import glob

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

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


class BuildAtOnce(build_ext):
    """Compiles the files of an extension at the same time."""

    def build_extension(self, ext):
        compile_files = self.compiler.compile

        def compile_each(sources, **options):
            with ThreadPoolExecutor() as pool:
                parts = pool.map(lambda source: compile_files([source], **options), sources)
                return [made for part in parts for made in part]

        self.compiler.compile = compile_each
        super().build_extension(ext)


setup(
    ext_modules=[HOST],
    cmdclass={"build_ext": BuildAtOnce},
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
