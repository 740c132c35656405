"""The base of what `status.json` and `site.json` contain."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StatusModel(BaseModel):
    """Base of the status models: values are read-only, keys of a newer version are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)
