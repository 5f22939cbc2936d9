"""A model's configuration as read by Transformers' class, which may differ from a host's class of the same name."""

from __future__ import annotations

from typing import Any

from ...logger_manager import get_logger

logger = get_logger(__name__)


def is_of_transformers(config: Any) -> bool:
    """Whether the configuration's class is Transformers' own."""
    return type(config).__module__.startswith("transformers.models.")


def as_transformers_reads(config: Any, model: str, revision: str | None = None) -> Any:
    """Read a text model's configuration with Transformers' class, if the host has its own class for the model type.

    A host's class may drop fields that newer files have, such as a rotation for each kind of layer.

    Args:
        config: the host's configuration.
        model: the folder or the name from which the host has read it.
        revision: the revision of a named model.

    Returns:
        ``config`` itself if its class is Transformers', or if Transformers has no class for it.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    name = CONFIG_MAPPING_NAMES.get(getattr(config, "model_type", ""))
    if is_of_transformers(config) or name is None:
        return config
    try:
        read = getattr(transformers, name).from_pretrained(model, revision=revision, local_files_only=True)
    except Exception as error:  # a check in Transformers' class that the host omits: the host's configuration stays
        logger.debug("%s does not read %s: %s", name, model, error)
        return config
    return read if read.num_hidden_layers == config.num_hidden_layers else config
