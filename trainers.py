"""The losses, and a Trainer for each method.

l is a row's log-probability: the mean over the tokens of its target, EOS included, in nats per token. The losses take
l under the policy and under the frozen reference model as (batch,) tensors and know no model; the trainers get them.
"""

import contextlib
import gc
import hashlib
import inspect
import json
import logging
import math
import os
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import rotate_checkpoints

import utils
from arguments import SPAGArguments
from dataloaders import FORMAT_VERSION, IGNORE_INDEX, RowDataset, scored_places

logger = logging.getLogger(__name__)
DIGESTED = ("config.json", "*.py", "*.safetensors")  # of a model folder


def token_logprob(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probability of each target under its logits, in fp32: (N, vocabulary), (N,) -> (N,)."""
    return -F.cross_entropy(logits.float(), targets, reduction="none")


def sequence_logprob(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean log-probability of each row's labels, nats per token: (batch, T, vocabulary), (batch, T) -> (batch,).

    Logits at position t predict the label at t + 1; labels of -100 are masked. A row without labels gives NaN.
    """
    scored = labels[:, 1:] != IGNORE_INDEX
    logprobs = token_logprob(logits[:, :-1][scored], labels[:, 1:][scored])
    return logprobs.new_zeros(scored.shape).masked_scatter(scored, logprobs).sum(1) / scored.sum(1)


def label_logprob(
    model: nn.Module, module: PreTrainedModel, batch: dict[str, torch.Tensor], *, pads_left: bool = True
) -> torch.Tensor:
    """`sequence_logprob` of a forward pass that makes logits only where a label is scored: (batch,).

    Prompts are most of the tokens, and (batch, T, vocabulary) logits most of the memory; here they are (scored tokens,
    vocabulary). `model` is what is called, perhaps wrapped by DDP or DeepSpeed; `module` the causal LM inside it.
    With padding on the right (`pads_left` False) no token sees any, and attention can be causal without a mask.
    """
    labels, mask = batch["labels"], batch["attention_mask"]
    inputs = {"input_ids": batch["input_ids"]}
    if pads_left:
        # The same tokens get the same positions on either side.
        inputs |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    accepted = inspect.signature(module.forward).parameters
    inputs = {name: tensor for name, tensor in inputs.items() if name in accepted}
    output_layer = module.get_output_embeddings()
    if output_layer is None:
        return sequence_logprob(model(**inputs).logits, labels)
    places = scored_places(labels) if "scored_places" not in batch else batch["scored_places"]

    def select(layer, args):  # hidden states that predict a scored label, as (1, scored tokens, hidden)
        return (args[0].flatten(0, 1).index_select(0, places).unsqueeze(0), *args[1:])

    with output_layer.register_forward_pre_hook(select):
        logits = model(**inputs).logits  # (1, scored tokens, vocabulary)
    if logits.shape[:2] != (1, len(places)):
        raise ValueError(f"{type(module).__name__} does not use its output layer as other causal LMs do")
    logprobs = token_logprob(logits[0], labels.flatten()[places + 1])
    by_place = logprobs.new_zeros(labels.numel()).scatter(0, places, logprobs)
    return by_place.view(labels.shape).sum(1) / (labels[:, 1:] != IGNORE_INDEX).sum(1)


def sft_loss(logprob: torch.Tensor, num_tokens: torch.Tensor, total_tokens: torch.Tensor | float) -> torch.Tensor:
    """Cross-entropy per token: (batch,) mean log-probabilities of (batch,) tokens each, over `total_tokens`."""
    return -(logprob * num_tokens).sum() / total_tokens


def sft_kl_loss(
    logprob: torch.Tensor,
    ref_logprob: torch.Tensor,
    weights: torch.Tensor,
    *,
    kl_coeff: float,
    num_rows: torch.Tensor | float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Imitation with a KL to the reference: mean of weight * (-l + beta * exp(l) * (l - l_ref)).

    Takes (batch,) tensors. The sum is divided by `num_rows`, by default the batch's.
    Returns the loss and metrics, all scalars.
    """
    log_ratio = logprob - ref_logprob
    kl = logprob.exp() * log_ratio
    num_rows = len(logprob) if num_rows is None else num_rows
    loss = (weights * (-logprob + kl_coeff * kl)).sum() / num_rows
    everywhere = torch.ones_like(weights)
    metrics = _ratio_metrics(log_ratio, everywhere) | {
        "sft_loss": _mean(-logprob * weights, everywhere),
        "kl": _mean(kl, everywhere),
    }
    return loss, metrics


def offline_po_loss(
    logprob: torch.Tensor,
    ref_logprob: torch.Tensor,
    rewards: torch.Tensor,
    weights: torch.Tensor,
    sft_mask: torch.Tensor,
    *,
    kl_coeff: float,
    sft_coeff: float,
    clip_range: float,
    num_game_rows: torch.Tensor | float | None = None,
    num_sft_rows: torch.Tensor | float | None = None,
    detach_kl: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Self-play's clipped policy loss on game rows, and SFT on the rows whose `sft_mask` is 1.

    r = exp(l - l_ref), A = reward - beta * (l - l_ref), whose gradient flows unless `detach_kl`;
    a game row costs -min(A r, A clip(r, 1 - eps, 1 + eps)) * weight, an SFT row -l * weight;
    loss = sum over game rows / num_game_rows + alpha * sum over SFT rows / num_sft_rows.

    Takes (batch,) tensors. The numbers are by default the batch's own; a kind with no rows contributes 0.
    Returns the loss and metrics, all scalars; a metric over no rows is NaN.
    """
    sft_mask = sft_mask.to(logprob.dtype)
    game_mask = 1 - sft_mask
    log_ratio = torch.where(sft_mask.bool(), 0.0, logprob - ref_logprob)
    ratio = log_ratio.exp()
    advantage = rewards - kl_coeff * (log_ratio.detach() if detach_kl else log_ratio)
    clipped_ratio = ratio.clamp(1 - clip_range, 1 + clip_range)
    game_costs = -torch.minimum(advantage * ratio, advantage * clipped_ratio) * weights * game_mask
    sft_costs = -logprob * weights * sft_mask
    policy_loss = _divide(game_costs.sum(), game_mask.sum() if num_game_rows is None else num_game_rows)
    sft_part = _divide(sft_costs.sum(), sft_mask.sum() if num_sft_rows is None else num_sft_rows)
    metrics = _ratio_metrics(log_ratio, game_mask) | {
        "policy_loss": _mean(game_costs, game_mask),
        "sft_loss": _mean(sft_costs, sft_mask),
        "clip_fraction": _mean((advantage * ratio > advantage * clipped_ratio).float(), game_mask),
    }
    return policy_loss + sft_coeff * sft_part, metrics


def _divide(total: torch.Tensor, count: torch.Tensor | float) -> torch.Tensor:
    """total / count, and 0 where there is nothing to count."""
    count = torch.as_tensor(count, dtype=total.dtype, device=total.device)
    return total / torch.where(count > 0, count, 1.0)


def _mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values where the mask is 1; NaN where it never is."""
    return ((values * mask).sum() / mask.sum()).detach()


def _ratio_metrics(log_ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    ratio = log_ratio.detach().exp()
    largest = torch.where(mask.bool(), ratio, -torch.inf).max()
    return {
        "log_ratio": _mean(log_ratio, mask),
        "ratio": _mean(ratio, mask),
        "ratio_max": torch.where(mask.any(), largest, torch.nan),
    }


class Denominators(NamedTuple):
    """What the losses divide by: of a micro-batch, or a micro-batch's share of a step's or a dataset's."""

    rows: torch.Tensor | float
    game_rows: torch.Tensor | float
    sft_rows: torch.Tensor | float
    tokens: torch.Tensor | float

    @classmethod
    def of(cls, batch: dict[str, torch.Tensor]) -> "Denominators":
        sft_rows = batch["sft_mask"].sum()
        rows = torch.full_like(sft_rows, len(batch["sft_mask"]))
        return cls(rows, rows - sft_rows, sft_rows, num_scored(batch).sum().to(rows.dtype))


def num_scored(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Number of scored target tokens of each row: (batch,)."""
    return (batch["labels"][:, 1:] != IGNORE_INDEX).sum(1)


class MetricSums:
    """Keeps metrics on the device between two logs, and averages them over micro-batches and ranks."""

    def __init__(self, role_names: Sequence[str] = ()):
        self.role_names = role_names  # of the numbers in a batch's roles, from 1
        self.values: list[dict[str, torch.Tensor]] = []  # of each micro-batch
        self.since = time.perf_counter()

    def add(self, metrics: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> None:
        """Add one micro-batch's metrics (scalars; NaN where it has no such rows), rewards by role and tokens."""
        values = dict(metrics)
        if "roles" in batch:
            for number, role in enumerate(self.role_names, start=1):
                mask = ((batch["roles"] == number) & (batch["sft_mask"] == 0)).to(batch["rewards"].dtype)
                values[f"reward_{role}"] = _mean(batch["rewards"], mask)
        self.values.append(values | {"tokens": batch["attention_mask"].sum()})

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """The averages since the last call, and tokens per second over all ranks; peak memory in GiB of this rank.

        Means are over the micro-batches that have a value, `..._max` is a maximum. A collective call.
        """
        names = sorted(self.values[0])
        stacked = torch.stack([torch.stack([values[name].float() for name in names]) for values in self.values])
        gathered = accelerator.gather(stacked)  # (micro-batches of all ranks, names)
        seconds = time.perf_counter() - self.since
        self.__init__(self.role_names)
        logs = {}
        for name, column in zip(names, gathered.T.cpu(), strict=True):
            known = column[~column.isnan()]
            if name == "tokens":
                logs["tokens_per_second"] = column.sum().item() / seconds
            elif len(known):
                logs[name] = (known.max() if name.endswith("_max") else known.mean()).item()
        return logs | {"peak_memory_gib": peak_memory_gib(accelerator.device)}


def peak_memory_gib(device: torch.device) -> float:
    """The most memory that this process has held: of the GPU's allocator, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    status = Path("/proc/self/status")
    if status.is_file():  # of Linux, where getrusage would also count the program that launched this one
        return int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30


def _load_stored(path: Path, rows: int) -> np.ndarray | None:
    """Stored log-probabilities of so many rows; None where there are none, or the file is damaged."""
    try:
        values = np.load(path)
        return values if values.shape == (rows,) else None
    except (OSError, ValueError, EOFError):
        return None


def model_digest(name_or_path: str) -> str:
    """SHA-256 over the configuration, code and weights of a model."""
    folder = utils.model_folder(name_or_path)
    return utils.file_digest(sorted(path for pattern in DIGESTED for path in folder.glob(pattern)))


class SPAGTrainer(Trainer):
    """What the methods share: the forward pass, the reference, row counts, metrics, whole checkpoints.

    A method adds `method_loss(logprob, ref_logprob, batch, counts) -> (loss, metrics)`, where `counts` of None means
    the micro-batch's own. `load_reference` makes the frozen reference model; it is called only where the policy
    itself, at its start or with its adapters off, cannot serve.
    """

    uses_reference = True
    counts_per_step = False  # whether the loss is always normalized over the optimizer step

    def __init__(self, *, args: SPAGArguments, load_reference: Callable[[], PreTrainedModel], **kwargs):
        super().__init__(args=args, **kwargs)
        self.module = self.model.get_base_model() if args.lora_rank else self.model
        # compute_loss returns a mean over the micro-batch: without this line the Trainer takes it for a sum over the
        # step and does not divide by the accumulation steps.
        self.model_accepts_loss_kwargs = False
        self.load_reference = load_reference
        self.reference: nn.Module | None = None  # of --ref_logprobs online
        self.metrics = MetricSums(self.train_dataset.role_names)
        self.eval_metrics = MetricSums(self.train_dataset.role_names)
        self.learning_rate = 0.0  # of the step at work
        self.add_callback(_Beginnings(self))

    def before_first_step(self) -> None:
        """The model is wrapped and placed, on resume also loaded; no step of this launch is done."""
        self.check_learning_rate()
        if self.state.global_step:
            step, last = self.state.global_step, self.state.max_steps
            logger.info("continuing after step %d of %d: %s", step, last, self.args.resume_from_checkpoint)
        counts = self.train_dataset.counts
        self.log({"rows": counts.rows, "rows_truncated": counts.truncated, "rows_dropped": counts.dropped})
        self.prepare_reference()
        gc.collect()  # a reference model that is not needed any more
        self.metrics = MetricSums(self.train_dataset.role_names)  # the clock starts

    def check_learning_rate(self) -> None:
        """Raise UserError if warm-up sits on the only step, which leaves it no learning rate."""
        one_step = self.state.max_steps == 1 and not self.state.global_step
        if one_step and self.args.learning_rate and not self._get_learning_rate():
            rows = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
            raise utils.UserError(
                f"the learning rate is 0 at every step: {len(self.train_dataset)} rows, {rows} a step, make one step, "
                "and warm-up takes it; use more rows, a smaller --gradient_accumulation_steps, or --warmup_steps 0"
            )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The method's loss; `num_items_in_batch` is what `get_batch_samples` counted."""
        logprob = self.logprob(model, self.module, inputs)
        ref_logprob = self.reference_logprob(inputs) if self.uses_reference else None
        loss, metrics = self.method_loss(logprob, ref_logprob, inputs, num_items_in_batch)
        (self.metrics if self.module.training else self.eval_metrics).add(metrics, inputs)
        return (loss, {"logprob": logprob}) if return_outputs else loss

    def logprob(self, model: nn.Module, module: PreTrainedModel, batch: dict) -> torch.Tensor:
        """(batch,) log-probabilities under the policy or the reference."""
        return label_logprob(model, module, batch, pads_left=self.data_collator.pad_left)

    def evaluate(self, *args, **kwargs):
        self.eval_metrics = MetricSums(self.train_dataset.role_names)  # the clock starts
        return super().evaluate(*args, **kwargs)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The batch's part of the loss over all rows: the Trainer weighs batches by their rows."""
        inputs = self._prepare_inputs(inputs)
        rows, sft_rows = self.eval_dataset.counts.rows, self.eval_dataset.counts.sft_rows
        share = len(inputs["labels"]) / rows
        totals = Denominators(rows, rows - sft_rows, sft_rows, self.eval_dataset.num_scored_tokens)
        counts = Denominators(*(count * share for count in totals))
        with torch.no_grad():
            return self.compute_loss(model, inputs, num_items_in_batch=counts), None, None

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of an optimizer step; under `step` normalization with their counts over all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches or not (self.counts_per_step or self.args.loss_normalization == "step"):
            return batches, None
        totals = sum(torch.stack(Denominators.of(batch)) for batch in batches).to(self.args.device)
        totals = self.accelerator.reduce(totals, reduction="sum")
        # The Trainer averages over micro-batches and ranks: dividing each by their mean count divides by the total.
        return batches, Denominators(*(totals / (len(batches) * self.accelerator.num_processes)))

    def _get_train_sampler(self, train_dataset=None):
        """As the Trainer's, but `batch_rebalance` follows --seed and needs no pass over the rows for their lengths."""
        if self.args.train_sampling_strategy != "batch_rebalance":
            return super()._get_train_sampler(train_dataset)
        args = self.args
        groups = args.gradient_accumulation_steps * args.world_size
        return BatchRebalanceSampler(
            lengths=np.minimum(self.train_dataset.lengths, args.max_length).tolist(),
            effective_batch_size=args.train_batch_size * groups,
            dp_size=args.world_size,
            grad_accum=args.gradient_accumulation_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            rank=args.process_index,
            drop_last=args.dataloader_drop_last,
        )

    def _prepare_inputs(self, inputs):
        """Move to the device as they are; under DeepSpeed the Trainer would round rewards and log-probabilities."""
        return {name: tensor.to(self.args.device) for name, tensor in inputs.items()}

    # The reference.

    def prepare_reference(self) -> None:
        """Before the first step: look up or compute the reference's log-probabilities, or load it for `online`."""
        if not self.uses_reference:
            return
        if self.args.ref_logprobs == "online":
            self.reference = None if self.args.lora_rank else self._load_reference_model()
            return
        digest = model_digest(self.args.ref_model_name_or_path) if self.is_world_process_zero() else None
        missing = []
        for dataset in filter(None, (self.train_dataset, self.eval_dataset)):
            path = Path(self.args.cache_dir) / "ref_logprobs" / f"{self._reference_key(dataset, digest)}.npy"
            stored = _load_stored(path, len(dataset)) if self.is_world_process_zero() else None
            (dataset.ref_logprobs,) = broadcast_object_list([stored])
            if dataset.ref_logprobs is None:
                missing.append((path, dataset))
        if missing:
            with self._reference_model() as (model, module):
                for path, dataset in missing:
                    dataset.ref_logprobs = self._reference_pass(dataset, model, module)
                    if self.is_world_process_zero():
                        with utils.replacing(path, "wb") as file:
                            np.save(file, dataset.ref_logprobs)

    def reference_logprob(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """(batch,) log-probabilities under the reference: those stored with the rows, or a forward pass now."""
        if "ref_logprobs" in batch:
            return batch["ref_logprobs"]
        if self.args.ref_logprobs == "precompute":
            raise ValueError("the reference's log-probabilities are computed when train() begins; it has not")
        with self._reference_model() as (model, module):
            return self._frozen_logprob(model, module, batch)

    def _frozen_logprob(self, model: nn.Module, module: PreTrainedModel, batch: dict) -> torch.Tensor:
        """As the policy's forward, in the same dtype and autocast; no gradient."""
        with torch.no_grad(), self.accelerator.autocast():
            return self.logprob(model, module, batch)

    def _reference_pass(self, dataset: RowDataset, model: nn.Module, module: PreTrainedModel) -> np.ndarray:
        """Log-probability of every row that needs one under the reference, (rows,) in fp32; each rank does its share.

        Rows go longest first in chunks of one batch a rank, the last filled up by repeating rows, so that all ranks
        make the same number of forward passes of about equal length.
        """
        rows = self.rows_with_reference(dataset)
        rows = rows[np.argsort(-dataset.lengths[rows], kind="stable")]
        batch_size, ranks = self.args.eval_batch_size, self.accelerator.num_processes
        steps = -(-len(rows) // (batch_size * ranks))
        shares = np.resize(rows, (steps, ranks, batch_size))  # an empty `rows` has no steps
        logprobs = []
        quiet = self.args.disable_tqdm or not self.is_local_process_zero()
        for share in tqdm(shares[:, self.accelerator.process_index], "reference", disable=quiet):
            batch = self._prepare_inputs(self.data_collator(dataset.__getitems__(share.tolist())))
            logprobs.append(self._frozen_logprob(model, module, batch))
        result = np.zeros(len(dataset), dtype=np.float32)
        if steps:
            gathered = self.accelerator.gather(torch.stack(logprobs))  # (ranks * steps, batch)
            result[shares.swapaxes(0, 1).reshape(-1)] = gathered.cpu().numpy().reshape(-1)
        return result

    def rows_with_reference(self, dataset: RowDataset) -> np.ndarray:
        """Indices of the rows whose loss compares with the reference."""
        return np.arange(len(dataset))

    @contextlib.contextmanager
    def _reference_model(self) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
        """The reference in eval mode: what to call, and the causal LM inside it."""
        training = self.model.training
        self.model.eval()
        if self.args.lora_rank:
            with self.model.disable_adapter():
                yield self.model_wrapped, self.module
        elif self.reference is None and self.state.global_step == 0 and self._starts_at_reference():
            yield self.model_wrapped, self.module
        else:
            reference = self._load_reference_model() if self.reference is None else self.reference
            yield reference, getattr(reference, "module", reference)
        self.model.train(training)

    def _starts_at_reference(self) -> bool:
        def same(identity: Callable[[str], str]) -> bool:
            return identity(self.args.model_name_or_path) == identity(self.args.ref_model_name_or_path)

        return utils.from_rank_0(lambda: same(os.path.realpath) or same(model_digest))

    def _load_reference_model(self) -> nn.Module:
        """The frozen reference in eval mode, on its device; under ZeRO-3 with an engine of its own."""
        model = self.load_reference().requires_grad_(False).eval()
        if not is_deepspeed_zero3_enabled():
            return model.to(self.args.device)
        import deepspeed

        policys = self.accelerator.state.deepspeed_plugin.deepspeed_config
        config = {name: policys[name] for name in ("bf16", "fp16", "steps_per_print") if name in policys}
        zero = policys["zero_optimization"].items()
        zero = {name: value for name, value in zero if name != "offload_optimizer" and value != "auto"}
        config |= {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.eval()
        return engine

    def _reference_key(self, dataset: RowDataset, digest: str | None) -> str:
        """What the reference's log-probabilities depend on, as one name."""
        parts = {
            "format": FORMAT_VERSION,
            "model": digest,
            "rows": dataset.key,  # data, tokenizer, special tokens, max_length and sides
            "scored": type(self).__name__ if len(self.rows_with_reference(dataset)) < len(dataset) else "all",
            "dtype": str(self.module.dtype),
            "autocast": self.accelerator.mixed_precision,
            "tf32": self.args.tf32,
            "attention": self.module.config._attn_implementation,
            "device": self.args.device.type,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    # Checkpoints and logs.

    def _save_checkpoint(self, model, trial):
        """Mark the folder as whole when every rank has written its part; only then may an older one go."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (folder / utils.COMPLETE).unlink(missing_ok=True)  # of one that has lost a file since
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        super()._save_checkpoint(model, trial)
        self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # ranks write into each other's folders
        sums = gather_object([utils.checksums(folder, of_rank=self.args.process_index)])
        if self.args.should_save:
            here = {name: each for of_rank in sums for name, each in of_rank.items() if (folder / name).is_file()}
            utils.write_json(folder / utils.COMPLETE, here)
            for other in utils.checkpoints(self.args.output_dir):
                if not utils.is_complete(other):  # a kill left it; it must not count below
                    shutil.rmtree(other)
            rotate_checkpoints(self.args.output_dir, limit, self.state.best_model_checkpoint)

    def log(self, logs, start_time=None):
        """Add the metrics gathered since the last log. Raises ValueError for a loss that is no number."""
        if "loss" in logs:
            if not math.isfinite(logs["loss"]):
                step = self.state.global_step
                raise utils.UserError(f"the loss of step {step} is {logs['loss']}; training stops here")
            logs |= self.metrics.take(self.accelerator) | {"learning_rate": self.learning_rate}
        elif "eval_loss" in logs:
            logs |= {f"eval_{name}": value for name, value in self.eval_metrics.take(self.accelerator).items()}
        super().log(logs, start_time)


class _Beginnings(TrainerCallback):
    """Tells the trainer when training and when a step begins."""

    def __init__(self, trainer: SPAGTrainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.before_first_step()

    def on_step_begin(self, args, state, control, **kwargs):
        self.trainer.learning_rate = self.trainer._get_learning_rate()  # once it is over, DeepSpeed has the next one


class SFTTrainer(SPAGTrainer):
    """Cross-entropy over all target tokens of the optimizer step."""

    uses_reference = False
    counts_per_step = True

    def method_loss(self, logprob, ref_logprob, batch, counts):
        tokens = num_scored(batch)
        return sft_loss(logprob, tokens, counts.tokens if counts else tokens.sum()), {}


class SFTwithKLTrainer(SPAGTrainer):
    """Imitation learning."""

    def method_loss(self, logprob, ref_logprob, batch, counts):
        return sft_kl_loss(
            logprob,
            ref_logprob,
            batch["weights"],
            kl_coeff=self.args.lm_kl_coeff,
            num_rows=counts.rows if counts else None,
        )


class OfflinePOTrainer(SPAGTrainer):
    """Self-play learning."""

    def rows_with_reference(self, dataset):
        return np.flatnonzero(~dataset.is_sft)

    def method_loss(self, logprob, ref_logprob, batch, counts):
        return offline_po_loss(
            logprob,
            ref_logprob,
            batch["rewards"],
            batch["weights"],
            batch["sft_mask"],
            kl_coeff=self.args.lm_kl_coeff,
            sft_coeff=self.args.lm_sft_coeff,
            clip_range=self.args.clip_range,
            num_game_rows=counts.game_rows if counts else None,
            num_sft_rows=counts.sft_rows if counts else None,
            detach_kl=self.args.detach_kl,
        )


TRAIN_METHODS = {"SFT": SFTTrainer, "SFTwithKL": SFTwithKLTrainer, "OfflinePO": OfflinePOTrainer}
