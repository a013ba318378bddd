"""Every error a user can cause, each a ValueError that says what is wrong and what would be right."""


class SpecInferError(ValueError):
    """Base of all errors caused by input; the command line turns it into one sentence and exit code 2."""


class ConfigError(SpecInferError):
    """A setting, a TOML file or a model's config.json asks for something that does not exist or contradicts itself."""


class CheckpointError(SpecInferError):
    """A model file is missing, truncated, corrupt, or does not hold exactly the tensors its architecture needs."""


class ModelNotFoundError(SpecInferError):
    """A model name, path or hub id leads nowhere; the message lists the known names."""


class TokenizerError(SpecInferError):
    """A tokenizer cannot be built, or a chat cannot be rendered with the model's template."""


class PromptError(SpecInferError):
    """A prompt is empty, too long, or holds ids outside the vocabulary."""


class SamplingError(SpecInferError):
    """A field of SamplingParams is out of range or not supported."""


class SpeculationError(SpecInferError):
    """A tree, a speculator or an SSM does not fit the LLM."""
