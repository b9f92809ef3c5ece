"""All metadata of the package; pyproject.toml holds the build system and the tools' settings."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """Returns the version from the package's text: importing it may need what is not there yet."""
    text = (ROOT / "jax_grpo" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


GGUF = ["gguf>=0.17"]
STUDY = ["matplotlib>=3.9"]
TEST = ["pytest>=8.2", "pytest-xdist>=3.6", *GGUF, *STUDY]

setup(
    name="jax_grpo",
    version=read_version(),
    description="Reinforcement learning of language models from verifiable rewards, in JAX",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["jax_grpo", "jax_grpo.*"]),
    # The lower bounds are what the tests were run with; see CONTRIBUTING.md before lowering one.
    install_requires=[
        "absl-py>=2.1",
        "datasets>=4.2",
        "flax>=0.12",
        "jax>=0.10",
        "jinja2>=3.1",  # transformers' chat templates, which it does not ask for by itself
        "ml_collections>=1.0",
        "ml_dtypes>=0.5",
        "mpmath>=1.3",
        "numpy>=2.0",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12",
        "tensorboardX>=2.6.2",
        "tokenizers>=0.22.2",
        "tqdm>=4.67",
        "transformers>=5.0",
    ],
    extras_require={
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda12]"],  # the one that also runs under older drivers
        "gguf": GGUF,
        "study": STUDY,
        "test": TEST,
        "dev": [*TEST, "mypy>=1.15", "ruff>=0.12"],
    },
    classifiers=[
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
