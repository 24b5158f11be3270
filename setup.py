"""The one declaration of packages, dependencies and entry points; tools are configured in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="torchkv",
    version="0.1.0",
    description="A torch.distributed backend that moves the KV cache between prefill and decode",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # Backends are packages of their own under backends/, found by entry point exactly as a third party's would be.
    packages=["torchkv", *(f"torchkv.{name}" for name in find_packages("torchkv")), *find_packages("backends")],
    package_dir={"": "backends", "torchkv": "torchkv"},
    package_data={name: ["py.typed"] for name in ("torchkv", "torchkv_ucx", "torchkv_loopback", "torchkv_nvshmem")},
    install_requires=[
        "torch>=2.11",
        "numpy>=1.26",
        "numba>=0.60",
        "msgspec>=0.19",
        "pyzmq>=26",
        "ucxx-cu13>=0.52,<0.53; platform_system == 'Linux'",
    ],
    extras_require={
        "nvshmem": ["nvshmem4py-cu13>=0.4.1,<0.5; platform_system == 'Linux'"],
        "metrics": ["prometheus_client>=0.20"],
        # Engines bring themselves, in versions of their own: see docs/integrations.md.
        "vllm": [],
        "sglang": [],
        "demo": ["transformers>=5.0,<6", "accelerate>=1.0", "matplotlib>=3.8"],
        # Of examples/server.
        "server": ["fastapi>=0.115", "httpx>=0.27", "transformers>=5.0,<6", "uvicorn>=0.30"],
        # Rivals of `python -m torchkv.bench engine` and `rivals`, and plots. Mooncake's wheels need a system with
        # libibverbs1. Those with CUDA install the same module as this one, which has none and is measured over TCP.
        "bench": [
            "nixl-cu13>=1.5; platform_system == 'Linux'",
            "mooncake-transfer-engine-non-cuda>=0.3.13; platform_system == 'Linux'",
            "matplotlib>=3.8",
        ],
        # The documentation site.
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1,<2"],
        # What tests and linters need beyond torchkv itself.
        "dev": [
            "build>=1.2",
            "hypothesis>=6.100",
            "mypy>=1.15,<3",
            "prometheus_client>=0.20",
            "pre-commit>=4",
            "pytest>=8",
            "pytest-cov>=5",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.8",
            "ruff>=0.9,<1",
            "sybil>=9",
            # Its interpreter runs the kernels without a GPU. CUDA builds of PyTorch pin a version, so this range must
            # not make pip choose another PyTorch: 3.6.0 comes with torch 2.11, 3.7.1 with 2.13.
            "triton>=3.6.0,<3.8; platform_system == 'Linux'",
        ],
    },
    entry_points={
        "torchkv.backends": [
            "ucx = torchkv_ucx:UCXTransport",
            "loopback = torchkv_loopback:LoopbackTransport",
            "nvshmem = torchkv_nvshmem:NVSHMEMTransport",
        ],
        "torch.distributed.backends": ["torchkv = torchkv.group.process_group:register_backend"],
        "sglang.srt.plugins": ["torchkv = torchkv.integrations.sglang:register"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Typing :: Typed",
    ],
)
