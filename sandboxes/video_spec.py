"""The videos of a task's environment, as its user writes them: sources, preparation, and the model (pure)."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from sandboxes.server_spec import AbsolutePath

VideoName = Annotated[str, Field(pattern=r"^[^/\x00]{1,255}$")]
_Url = Annotated[str, Field(pattern=r"^https?://[\x21-\x7e]+$", max_length=2048)]
_Name = Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=512)]


class VideoModel(BaseModel):
    """An OpenAI-compatible endpoint, such as vLLM. The settings that shape its answers are part of a state's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: _Url = Field(description="The base URL, such as http://127.0.0.1:8000/v1.")
    model: _Name = Field(description="The model that answers questions about images.")
    embed_model: _Name | None = Field(
        default=None, description="The model that embeds texts. Without one, words are compared."
    )
    image_embed_model: _Name | None = Field(
        default=None, description="The model that embeds images, and the texts that they are searched by."
    )
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        default=None, description="Environment variable of the proxy that holds the API key."
    )
    temperature: float = Field(default=0.0, ge=0, le=2)
    seed: int = Field(default=0, ge=0, le=1 << 31)
    max_tokens: int = Field(default=256, ge=1, le=1 << 16)
    timeout_s: float = Field(default=60.0, gt=0, le=3600, description="Time limit of one question.")
    parallel: int = Field(default=8, ge=1, le=1024, description="How many questions are sent at once.")

    def fingerprint(self) -> dict[str, Any]:
        """Return the members that shape answers, as JSON."""
        return self.model_dump(mode="json", exclude={"api_key_env", "timeout_s", "parallel"})


class VideoTools(BaseModel):
    """The videos that `load_video` knows by name, and how `preprocess` prepares them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # A directory, whose files are known by their names; one file; or files by name.
    source: AbsolutePath | dict[VideoName, AbsolutePath]
    segment_s: float = Field(default=2.0, ge=0.5, le=600)
    frame_s: float = Field(
        default=1.0,
        ge=0.1,
        le=600,
        description="Interval of the images that are kept, in addition to one of each shot.",
    )
    max_side: int = Field(default=448, ge=64, le=2048, description="Longer side of kept images, in pixels.")
    max_duration_s: float = Field(default=3 * 3600.0, gt=0, le=1e6)
    preprocess_s: float = Field(
        default=3600.0, gt=0, le=86_400, description="Time limit of one preprocess, without the models."
    )
    model: VideoModel | None = None
    variants: int = Field(
        default=1,
        ge=1,
        le=64,
        description="How many answers of the model are recorded for one question. Rollouts take turns.",
    )

    def measurement_settings(self) -> dict[str, Any]:
        """Return the settings that shape the measurements."""
        return {"segment_s": self.segment_s, "frame_s": self.frame_s, "max_side": self.max_side}

    def root(self) -> dict[str, Any]:
        """Return the members that name a root state. `Driver.identity` covers the content of the videos."""
        model = None if self.model is None else self.model.fingerprint()
        return self.measurement_settings() | {
            "max_duration_s": self.max_duration_s,
            "model": model,
            "variants": self.variants,
        }
