"""What a task says of its videos: where they are, how they are prepared, which model is asked (pure)."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

VideoName = Annotated[str, Field(pattern=r"^[^/\x00]{1,255}$")]
_AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]
_Url = Annotated[str, Field(pattern=r"^https?://[\x21-\x7e]+$", max_length=2048)]
_Name = Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=512)]


class VideoModel(BaseModel):
    """An OpenAI-compatible endpoint (vLLM serves one). What shapes its answers is part of a state's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: _Url = Field(description="as http://127.0.0.1:8000/v1")
    model: _Name = Field(description="answers questions about pictures")
    embed_model: _Name | None = Field(default=None, description="of texts; without one, words are compared")
    image_embed_model: _Name | None = Field(default=None, description="of pictures, and of texts to find them by")
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = Field(
        default=None, description="environment variable of the proxy that holds the key"
    )
    temperature: float = Field(default=0.0, ge=0, le=2)
    seed: int = Field(default=0, ge=0, le=1 << 31)
    max_tokens: int = Field(default=256, ge=1, le=1 << 16)
    timeout_s: float = Field(default=60.0, gt=0, le=3600, description="of one question")
    parallel: int = Field(default=8, ge=1, le=1024, description="questions at once")

    def fingerprint(self) -> dict[str, Any]:
        """Return the members that shape answers."""
        return self.model_dump(mode="json", exclude={"api_key_env", "timeout_s", "parallel"})


class VideoTools(BaseModel):
    """The videos that `load_video` knows by name, and what `preprocess` makes of one.

    source: a directory, whose files are known by their names; a file; or files by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: _AbsolutePath | dict[VideoName, _AbsolutePath]
    segment_s: float = Field(default=2.0, ge=0.5, le=600)
    frame_s: float = Field(default=1.0, ge=0.1, le=600, description="a picture is kept this often, and of each shot")
    max_side: int = Field(default=448, ge=64, le=2048, description="of kept pictures, in pixels")
    max_duration_s: float = Field(default=3 * 3600.0, gt=0, le=1e6)
    preprocess_s: float = Field(default=3600.0, gt=0, le=86_400, description="limit of one preprocess, models aside")
    model: VideoModel | None = None
    variants: int = Field(
        default=1, ge=1, le=64, description="recorded answers of a model to one question, dealt out by rollout"
    )

    def pipeline(self) -> dict[str, Any]:
        """Return the settings that shape what is measured."""
        return {"segment_s": self.segment_s, "frame_s": self.frame_s, "max_side": self.max_side}

    def root(self) -> dict[str, Any]:
        """Return what names a root state; where the videos are does not, what they hold does (`Driver.identity`)."""
        model = None if self.model is None else self.model.fingerprint()
        return self.pipeline() | {"max_duration_s": self.max_duration_s, "model": model, "variants": self.variants}
