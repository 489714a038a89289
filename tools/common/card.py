"""The model card of a training."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

TEXT = """# {base} trained by {method}

Trained with an implementation of SPAG (self-playing adversarial language games,
[Cheng et al., 2024](https://arxiv.org/abs/2404.10642)) that is independent of its authors.

- Base model: `{base}`
- Method: {details}
- Data: {data}

```bibtex
@inproceedings{{cheng2024spag,
  title = {{Self-playing Adversarial Language Game Enhances {{LLM}} Reasoning}},
  author = {{Cheng, Pengyu and Hu, Tianhao and Xu, Han and Zhang, Zhisong and Dai, Yong and Han, Lei and Du, Nan}},
  booktitle = {{Advances in Neural Information Processing Systems}}, year = {{2024}}, note = {{arXiv:2404.10642}}
}}
```
"""


def write_card(
    folder: Path,
    *,
    base: str,
    reference: str | None,
    method: str,
    coefficients: Mapping[str, object],
    lora_rank: int | None,
    merged: bool,
    data: Sequence[str],
    rows: str,
) -> None:
    """Write FOLDER/README.md, in which local models and data appear by their last path component only."""
    details = [f"{name} {value}" for name, value in coefficients.items()]
    if reference:
        details.append(f"reference `{public_name(reference)}`")
    if lora_rank:
        details.append(f"LoRA of rank {lora_rank}" + ", merged" * merged)
    metadata = ModelCardData(
        base_model=None if Path(base).exists() else base,
        datasets=[name for name in data if not Path(name).exists()] or None,
        library_name="peft" if lora_rank and not merged else "transformers",
        pipeline_tag="text-generation",
        tags=["spag", method],
    )
    text = TEXT.format(
        base=public_name(base),
        method=method,
        details=f"{method} ({', '.join(details)})" if details else method,
        data=f"{', '.join(f'`{public_name(name)}`' for name in data)}: {rows}",
    )
    ModelCard(f"---\n{metadata.to_yaml()}\n---\n{text}").save(folder / "README.md")


def public_name(name: str) -> str:
    """A name without the path on this machine; hub names stay."""
    return Path(name).absolute().name if Path(name).exists() else name
