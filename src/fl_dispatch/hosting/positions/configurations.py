"""A model's configuration as Transformers' own class reads its file, beside a host's class of the same name."""

from __future__ import annotations

from typing import Any

from fl_dispatch.logger_manager import get_logger

logger = get_logger(__name__)


def is_of_transformers(config: Any) -> bool:
    """Whether the configuration's class is Transformers' own."""
    return type(config).__module__.startswith("transformers.models.")


def as_transformers_reads(config: Any, model: str, revision: str | None = None) -> Any:
    """The configuration of a text model by Transformers' class, where a host has a class of its own for the same kind.

    A host's class may drop fields that newer files have, such as a rotation for each kind of layer.

    Args:
        config: the host's.
        model: the folder or the name that the host has read it from.
        revision: of a name.

    Returns:
        ``config`` itself where it is Transformers', or where Transformers has no class for it.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    name = CONFIG_MAPPING_NAMES.get(getattr(config, "model_type", ""))
    if is_of_transformers(config) or name is None:
        return config
    try:
        read = getattr(transformers, name).from_pretrained(model, revision=revision, local_files_only=True)
    except Exception as error:  # of checks of a class that the host does without: the host's configuration holds
        logger.debug("%s does not read %s: %s", name, model, error)
        return config
    return read if read.num_hidden_layers == config.num_hidden_layers else config
