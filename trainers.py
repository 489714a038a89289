"""The losses, and the Trainer of each method.

l is a row's log-probability: the mean over the tokens of its target, EOS included, in nats per token. The losses take
l under the policy and under the frozen reference model as (batch,) tensors. As released, l is a mean and not a sum, so
one clip range serves short and long targets.
"""

import contextlib
import dataclasses
import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import Dataset, concatenate_datasets
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from dataloaders import IGNORE_INDEX, SPAGCollator, column, numbers_by_row, scored_positions, split_by_row
from tools.common.card import write_card
from tools.common.checkpoints import COMPLETE, delete_checkpoint, old_checkpoints
from tools.common.errors import UserError, user_errors
from tools.common.files import replacing
from tools.common.flags import flag
from tools.common.models import load_for_training, make_weights_readable
from tools.common.ranks import on_rank_0, rank
from tools.common.rowformats import GAME, KINDS

REFERENCE_NAME = "ref_model_name_or_path"  # flag of methods that use a reference model
REFERENCE = "ref_logprobs"  # in batches: log-probabilities under the reference
MICRO_BATCH = "micro_batch"  # of --loss_normalization

# What a loss returns beside itself, with the same names in every micro-batch. Pairs (sum, count) are summed over
# micro-batches and ranks and logged as sum / count, unless the count is 0. Plain tensors, the parts of the loss, count
# once per micro-batch. For names that end in _max the largest value is logged.
Metrics = dict[str, Tensor | tuple[Tensor, Tensor]]


def token_logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target under its logits, in fp32: (N, vocabulary), (N,) -> (N,).

    In bf16 l - l_ref, a small difference of two such numbers, would be lost in rounding.
    """
    return -F.cross_entropy(logits.float(), targets, reduction="none")


def sequence_logprob(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean log-probability of each row's labels, nats per token: (batch, T, vocabulary), (batch, T) -> (batch,).

    Logits at position t predict the label at t + 1; labels of -100 are masked. A row without labels gives NaN.
    This is the definition; training computes the same without materializing all logits (`label_logits`).
    """
    predicting = logits[:, :-1]
    targets = labels[:, 1:]
    scored = targets != IGNORE_INDEX
    logprobs = token_logprob(predicting[scored], targets[scored])
    by_position = logprobs.new_zeros(scored.shape).masked_scatter(scored, logprobs)
    return by_position.sum(1) / scored.sum(1)


def sft_loss(logprob: Tensor, num_tokens: Tensor, total_tokens: Tensor | float) -> Tensor:
    """Cross-entropy per token, from each row's mean log-probability and number of tokens, both (batch,)."""
    return -(logprob * num_tokens).sum() / total_tokens


def sft_kl_loss(
    logprob: Tensor,
    ref_logprob: Tensor,
    weights: Tensor,
    *,
    kl_coeff: float,
    num_rows: Tensor | float | None = None,
) -> tuple[Tensor, Metrics]:
    """Imitation with a KL to the reference: mean of weight * (-l + beta * exp(l) * (l - l_ref)).

    Takes (batch,) tensors. The sum is divided by `num_rows`, by default the number of rows in the batch. As released,
    the KL term is the KL's summand for the row's own target, with means over tokens instead of sums. It is not a
    sample estimate, because the target was not drawn from the policy.
    """
    log_ratio = logprob - ref_logprob
    kl = logprob.exp() * log_ratio
    num_rows = len(logprob) if num_rows is None else num_rows
    loss = (weights * (-logprob + kl_coeff * kl)).sum() / num_rows
    everywhere = torch.ones_like(weights)
    metrics = _ratio_metrics(log_ratio, everywhere) | {
        "sft_loss": (-logprob * weights).sum().detach() / num_rows,
        "kl": over_rows(kl, everywhere),
    }
    return loss, metrics


def offline_po_loss(
    logprob: Tensor,
    ref_logprob: Tensor,
    rewards: Tensor,
    weights: Tensor,
    sft_mask: Tensor,
    *,
    kl_coeff: float,
    sft_coeff: float,
    clip_range: float,
    num_game_rows: Tensor | float | None = None,
    num_sft_rows: Tensor | float | None = None,
    detach_kl: bool = False,
) -> tuple[Tensor, Metrics]:
    """Self-play's clipped policy loss on game rows, and SFT on the rows whose `sft_mask` is 1.

    r = exp(l - l_ref), A = reward - beta * (l - l_ref);
    a game row costs -min(A r, A clip(r, 1 - eps, 1 + eps)) * weight, an SFT row -l * weight;
    loss = sum over game rows / num_game_rows + alpha * sum over SFT rows / num_sft_rows.

    Takes (batch,) tensors. As released, the gradient also flows through the KL inside A, unless `detach_kl`. The clip
    bounds r but not A, so a row with a negative reward is pushed down until A = beta; for a reward of -0.5 and
    beta = 0.2 that is at l - l_ref = -3.5.

    Row counts default to the batch's; a kind without rows contributes 0. Each kind is divided by its own count, so
    alpha weighs two means, whatever the mix of rows.
    """
    sft_mask = sft_mask.to(logprob.dtype)
    game_mask = 1 - sft_mask
    # SFT rows have no reference log-probability, and an infinite ratio times a mask of 0 would be NaN.
    log_ratio = torch.where(sft_mask.bool(), 0.0, logprob - ref_logprob)
    ratio = log_ratio.exp()
    advantage = rewards - kl_coeff * (log_ratio.detach() if detach_kl else log_ratio)
    clipped_ratio = ratio.clamp(1 - clip_range, 1 + clip_range)
    game_costs = -torch.minimum(advantage * ratio, advantage * clipped_ratio) * weights * game_mask
    sft_costs = -logprob * weights * sft_mask
    policy_loss = divide(game_costs.sum(), game_mask.sum() if num_game_rows is None else num_game_rows)
    sft_part = divide(sft_costs.sum(), sft_mask.sum() if num_sft_rows is None else num_sft_rows)
    metrics = _ratio_metrics(log_ratio, game_mask) | {
        "log_ratio_positive": over_rows(log_ratio, game_mask * (rewards > 0)),
        "log_ratio_negative": over_rows(log_ratio, game_mask * (rewards < 0)),
        "policy_loss": policy_loss.detach(),
        "sft_loss": sft_part.detach(),
        "clip_fraction": over_rows((advantage * ratio > advantage * clipped_ratio).float(), game_mask),
    }
    return policy_loss + sft_coeff * sft_part, metrics


def divide(total: Tensor, count: Tensor | float) -> Tensor:
    """total / count, or the total, which is then 0, if the count is 0."""
    count = torch.as_tensor(count)
    return total / torch.where(count == 0, 1.0, count)  # an `if` would synchronize the GPU


def over_rows(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and number of the values where the mask is 1."""
    return (values * mask).sum().detach(), mask.sum()


def _ratio_metrics(log_ratio: Tensor, mask: Tensor) -> Metrics:
    ratio = log_ratio.detach().exp()
    largest = torch.where(mask.bool(), ratio, 0.0).max()
    return {
        "log_ratio": over_rows(log_ratio, mask),
        "ratio": over_rows(ratio, mask),
        "ratio_max": (largest, mask.sum()),
    }


def loss_denominators(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Loss denominators of a batch: all `rows`, those of each kind (`game_rows`, `sft_rows`), and scored `tokens`.

    If each micro-batch is divided by its own counts, as released, a row of OfflinePO counts more where its micro-batch
    has few rows of its kind, so the micro-batch size changes the results. A row of weight 0 counts as one row.
    """
    of_kind = {f"{kind}_rows": batch[f"{kind}_mask"].sum() for kind in KINDS}
    tokens = num_scored(batch).sum().float()
    return of_kind | {"rows": torch.full_like(tokens, len(batch["labels"])), "tokens": tokens}


def num_scored(batch: dict[str, Tensor]) -> Tensor:
    """Number of scored target tokens of each row: (batch,)."""
    return (batch["labels"][:, 1:] != IGNORE_INDEX).sum(1)


def label_logits(
    model: nn.Module, module: PreTrainedModel, batch: dict[str, Tensor], *, pads_left: bool = True
) -> Tensor:
    """Logits of a forward pass, computed only where they predict a scored label: (scored tokens, vocabulary).

    Most tokens belong to prompts, and logits for all of them, (batch, T, vocabulary), would take most of the memory.
    `model` is called and may be wrapped by DDP or DeepSpeed; `module` is the causal LM inside it. `pads_left=False`
    means padding on the right, where causal attention needs no mask.

    Only the logits are used, so a mixture of experts trains without its router's auxiliary loss.
    """
    inputs = {"input_ids": batch["input_ids"], "use_cache": False}
    if pads_left:  # position 0 is the first real token, as with padding on the right
        mask = batch["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        inputs |= {"attention_mask": mask, "position_ids": positions}
    predicting_positions = _scored_positions(batch)

    def select(layer, args):
        hidden, *rest = args  # (batch, T, hidden)
        predicting = hidden.flatten(0, 1).index_select(0, predicting_positions)
        return (predicting.unsqueeze(0), *rest)  # (1, scored tokens, hidden)

    with module.get_output_embeddings().register_forward_pre_hook(select):
        return model(**inputs).logits[0]


def scored_logprob(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Log-probability of each scored token under the logits of `label_logits`: (scored tokens,)."""
    return token_logprob(logits, batch["labels"].flatten()[_scored_positions(batch) + 1])


def row_means(values: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean over each row's scored tokens: (scored tokens,) -> (batch,)."""
    labels = batch["labels"]
    by_position = values.new_zeros(labels.numel()).scatter(0, _scored_positions(batch), values)
    return by_position.view(labels.shape).sum(1) / num_scored(batch)


def label_logprob(
    model: nn.Module, module: PreTrainedModel, batch: dict[str, Tensor], *, pads_left: bool = True
) -> Tensor:
    """`sequence_logprob` of a forward pass, with the arguments of `label_logits`: (batch,)."""
    return row_means(scored_logprob(label_logits(model, module, batch, pads_left=pads_left), batch), batch)


def _scored_positions(batch: dict[str, Tensor]) -> Tensor:
    return batch["scored_positions"] if "scored_positions" in batch else scored_positions(batch["labels"])


class MetricSums:
    """Metrics since the last log. They stay on the device, because reading them would synchronize the GPU."""

    def __init__(self):
        self.totals: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, metrics: Metrics) -> None:
        for name, metric in metrics.items():
            value, count = metric if isinstance(metric, tuple) else (metric, torch.ones_like(metric))
            if name in self.totals:
                total, number = self.totals[name]
                value = torch.maximum(total, value) if name.endswith("_max") else total + value
                count = number + count
            self.totals[name] = value, count

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """The metrics over all ranks since the last call. Every rank must call this."""
        pairs = torch.stack([torch.stack(pair) for pair in self.totals.values()])  # (names, 2)
        by_rank = accelerator.gather(pairs.unsqueeze(0)).cpu()  # (ranks, names, 2)
        logs = {}
        for name, (values, counts) in zip(self.totals, by_rank.permute(1, 2, 0), strict=True):
            if count := counts.sum().item():
                logs[name] = values.max().item() if name.endswith("_max") else values.sum().item() / count
        self.totals = {}
        return logs


class BeforeFirstStep(TrainerCallback):
    """Calls a function once the model is wrapped, on its device and, in a resumed run, restored."""

    def __init__(self, function: Callable[[], None]):
        self.function = function

    def on_train_begin(self, args, state, control, **kwargs):
        self.function()


class RebalancedEpochs(TrainerCallback):
    """Gives the sampler of `batch_rebalance` the run's seed and the epoch.

    The Trainer always gives it seed 42, and does not reach it when a run of several processes is resumed.
    """

    def on_epoch_begin(self, args, state, control, train_dataloader, **kwargs):
        sampler = train_dataloader.batch_sampler
        sampler = getattr(sampler, "batch_sampler", sampler)  # accelerate wraps it if there are several processes
        sampler.seed = args.seed if args.data_seed is None else args.data_seed
        sampler.set_epoch(int(state.epoch or 0))


def collate_once(collate: SPAGCollator, first_index: int, rows: list[dict]) -> dict[str, Tensor]:
    """Collate an evaluation's rows without repeats.

    With several processes, accelerate fills the last batches with the set's first rows, from `first_index`. A batch of
    repeats alone stays, because all ranks must call the model equally often; the Trainer drops its loss.
    """
    ends = [place for place, row in enumerate(rows) if row["index"] == first_index and place]
    return collate(rows[: ends[0]] if ends else rows)


class SPAGTrainer(Trainer):
    """What the methods share: forward pass, reference, row counts, metrics, checkpoints.

    A method is a subclass listed in TRAIN_METHODS. It defines `method_loss` and the class attributes below, from which
    parser, checks, --help, recorded settings and model card follow. Its docstring is its help text.

    No separate reference model is loaded if no row needs one, if a resumed run has stored its log-probabilities (and
    has no evaluation rows), or if the policy can serve as the reference: with its adapters off, or before the first
    step if both are the same checkpoint.
    """

    flags: ClassVar[dict[str, dataclasses.Field]] = {}  # coefficients of the loss
    averages_rows = True  # the loss is a mean over rows of a micro-batch or step; False: over a step's tokens
    compared_kinds: ClassVar[tuple[str, ...]] = ()  # kinds of rows for which the loss gets `ref_logprobs`
    scores_tokens = False  # True: `logprobs` has a number for each scored token instead of each row's mean
    reads_weights = True  # False: rows of weight 0 are dropped, and all others have weight 1
    learns_from_games = False  # the loss gets rewards, so there must be rows of games

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The flags that this method uses and others may refuse, with their defaults."""
        defaults: dict[str, Any] = {REFERENCE_NAME: None} if cls.compared_kinds else {}
        defaults |= {"loss_normalization": MICRO_BATCH} if cls.averages_rows else {}
        defaults |= {"allow_no_game_rows": False} if cls.learns_from_games else {}
        return defaults | {name: each.default for name, each in cls.flags.items()}

    @classmethod
    def coefficients(cls, args: TrainingArguments | None = None) -> dict[str, Any]:
        """Keyword arguments of the loss: the flags' values, or their defaults; lm_kl_coeff becomes kl_coeff."""
        return {
            name.removeprefix("lm_"): getattr(args, name) if args else each.default for name, each in cls.flags.items()
        }

    def __init__(self, *, args: TrainingArguments, **kwargs):
        with user_errors("the Trainer", ValueError, ImportError):
            super().__init__(args=args, **kwargs)
        self.module = self.model.get_base_model() if args.lora_rank else self.model
        self.model_accepts_loss_kwargs = False  # else the loss would not be divided by the accumulation steps
        self.metrics = MetricSums()
        self.last_batch = time.perf_counter()
        # Micro-batches whose loss was NaN or infinite. Read only when a step is logged, a checkpoint written or
        # training ends, because reading synchronizes the GPU.
        self.not_finite = torch.zeros((), device=args.device)
        self.add_callback(BeforeFirstStep(self.before_first_step))
        if args.train_sampling_strategy == "batch_rebalance":
            self.add_callback(RebalancedEpochs())

    def before_first_step(self) -> None:
        """Check what would otherwise fail only at the end, and compute the reference's log-probabilities.

        The reference is frozen, so each is computed once, and no second model takes memory in training.
        """
        self.check_learning_rate()
        self.check_saving()
        if self.compared_kinds:
            self.add_table(REFERENCE, self.compute_reference, by_token=self.scores_tokens)
            gc.collect()  # frees the reference model
        self.last_batch = time.perf_counter()

    def check_learning_rate(self) -> None:
        """UserError if the only step is a warm-up step, whose learning rate of 0 would not change the model."""
        only_step = self.state.max_steps == 1 and not self.state.global_step
        if only_step and self.args.learning_rate > 0 and not self._get_learning_rate():
            raise UserError(
                f"the learning rate is 0 at every step: {len(self.train_dataset)} rows make a single step, which is "
                "warm-up; use more rows, a smaller --gradient_accumulation_steps, or --warmup_steps 0"
            )

    def check_saving(self) -> None:
        """Save the model's configuration to a scratch folder, so that an error shows now and not at the end."""
        with tempfile.TemporaryDirectory() as folder:
            self.module.config.save_pretrained(folder)
            if self.module.can_generate():
                self.module.generation_config.save_pretrained(folder)

    def score(self, logits: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the loss and the metrics need of the logits at labels, (scored tokens, vocabulary): tensors by name.

        `logprobs` is (batch,), or (scored tokens,) with `scores_tokens`. The reference's are stored as `ref_logprobs`.
        """
        logprobs = scored_logprob(logits, batch)
        return {"logprobs": logprobs if self.scores_tokens else row_means(logprobs, batch)}

    def forward(self, model: nn.Module, module: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """`score` of a forward pass of the policy or the reference; `model` and `module` as in `label_logits`."""
        return self.score(label_logits(model, module, batch, pads_left=self.data_collator.pad_left), batch)

    def method_loss(self, batch: dict[str, Tensor], denominators: dict[str, Tensor]) -> tuple[Tensor, Metrics]:
        """Loss and metrics of a micro-batch. `batch` has the tensors of the collator and of `score`.

        `denominators` are the batch's `loss_denominators`, or their mean over the micro-batches of a step.
        """
        raise NotImplementedError

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The method's loss; `num_items_in_batch` is what `get_batch_samples` returned."""
        batch = inputs | self.forward(model, self.module, inputs)
        denominators = loss_denominators(inputs) if num_items_in_batch is None else num_items_in_batch
        loss, metrics = self.method_loss(batch, denominators)
        if self.module.training:
            self.not_finite += ~loss.detach().isfinite()
            self.metrics.add(metrics | self.speed(inputs))
        return loss

    def speed(self, batch: dict[str, Tensor]) -> Metrics:
        """Tokens per second over all ranks since the last micro-batch, including evaluations and checkpoints."""
        now = time.perf_counter()
        seconds = (now - self.last_batch) / self.accelerator.num_processes
        self.last_batch = now
        tokens = batch["attention_mask"].sum().float()
        return {"tokens_per_second": (tokens, torch.full_like(tokens, seconds))}

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss of an evaluation batch, of which the Trainer takes the mean over rows.

        Divided by the batch's share, by rows, of the whole set's counts, whatever `loss_normalization` is. So neither
        the micro-batch nor the order of rows changes `eval_loss`.
        """
        shares = {name: count * len(inputs["labels"]) for name, count in self.eval_counts.items()}
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=shares), None, None

    def get_eval_dataloader(self, eval_dataset=None):
        """Batches of all rows, each once. (The Trainer's would obey --dataloader_drop_last and have repeated rows.)"""
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        loader = DataLoader(
            rows,
            batch_size=self.args.eval_batch_size,
            collate_fn=partial(collate_once, self.data_collator, rows[0]["index"]),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def evaluation_loop(self, dataloader, *args, **kwargs):
        all_rows = DataLoader(dataloader.dataset, self.args.eval_batch_size, collate_fn=self.data_collator)
        totals = self.total_denominators(all_rows)  # each row once per rank
        self.eval_counts = {name: total / totals["rows"] for name, total in totals.items()}
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def total_denominators(self, batches: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The sums of `loss_denominators` over these batches of all ranks."""
        counts = [loss_denominators(batch) for batch in batches]
        of_this_rank = sum(torch.stack([*each.values()]) for each in counts)
        totals = self.accelerator.reduce(of_this_rank.to(self.args.device), reduction="sum")
        return dict(zip(counts[0], totals, strict=True))

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """A step's micro-batches and, unless each is normalized by itself, the step's denominators over all ranks."""
        if self.state.global_step >= self.state.max_steps:  # resumed at the end; the Trainer would do one more step
            return [], None
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches or self.args.loss_normalization == MICRO_BATCH:
            return batches, None
        # The Trainer averages over all n micro-batches of all ranks. Each divides its costs by (total count / n), so
        # the average is total cost / total count.
        micro_batches = len(batches) * self.accelerator.num_processes
        totals = self.total_denominators(batches)
        return batches, {name: total / micro_batches for name, total in totals.items()}

    def _prepare_inputs(self, inputs):
        """Move the batch to the device. (Under DeepSpeed the Trainer would also round rewards to half precision.)"""
        return {name: tensor.to(self.args.device) for name, tensor in inputs.items()}

    def add_table(
        self, name: str, compute: Callable[[Dataset], dict[int, np.ndarray]], *, by_token: bool = False
    ) -> None:
        """Add a tensor of this name to batches, from what `compute` returns for rows by `index`.

        It has one value per row, (batch,), or with `by_token` one per scored token, (scored tokens,). A run resumed
        from a checkpoint reads the training rows' values from OUTPUT_DIR/NAME.npy, which are valid because a start
        with other rows or models is refused.
        """
        path = Path(self.args.output_dir, f"{name}.npy")
        training = column(self.train_dataset, "index").tolist()
        todo = [rows for rows in (self.train_dataset, self.eval_dataset) if rows]
        table: dict[int, np.ndarray] = {}
        if self.args.resume_from_checkpoint and on_rank_0(path.is_file):
            sizes = numbers_by_row(self.train_dataset, by_token=by_token)
            table |= zip(training, split_by_row(np.load(path), sizes), strict=True)
            todo.remove(self.train_dataset)
        if todo:
            table |= compute(concatenate_datasets(todo))
            if rank() == 0:
                with replacing(path) as file:
                    np.save(file, np.concatenate([table[index] for index in training]))
        self.data_collator.tables[name] = table

    def compute_reference(self, rows: Dataset) -> dict[int, np.ndarray]:
        """`logprobs` of the rows under the reference; 0 for rows whose loss does not need them.

        Rows are batched longest first, so that batches have little padding and the first one shows whether memory
        suffices (--per_device_eval_batch_size does not change the values). Repeated rows fill the last batches,
        because all ranks must call the model equally often.
        """
        compared = np.flatnonzero(np.isin(column(rows, "kind"), self.compared_kinds))
        compared = compared[np.argsort(-column(rows, "length")[compared], kind="stable")]
        sizes = numbers_by_row(rows, by_token=self.scores_tokens)
        values = split_by_row(np.zeros(sizes.sum(), dtype=np.float32), sizes)
        if len(compared):
            with self._reference_model() as (model, module):
                for row, numbers in self._reference_pass(rows, compared, sizes, model, module):
                    values[row][:] = numbers
        total = self.accelerator.reduce(torch.from_numpy(np.concatenate(values)).to(self.args.device), "sum")
        return dict(zip(column(rows, "index").tolist(), split_by_row(total.cpu().numpy(), sizes), strict=True))

    def _reference_pass(
        self, rows: Dataset, compared: np.ndarray, sizes: np.ndarray, model: nn.Module, module: PreTrainedModel
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield this rank's share of the compared rows with their values."""
        batch_size = self.args.eval_batch_size
        ranks = self.accelerator.num_processes
        steps = math.ceil(len(compared) / (batch_size * ranks))
        chunks = np.arange(steps * ranks * batch_size).reshape(steps, ranks, batch_size)
        quiet = self.args.disable_tqdm or not self.is_local_process_zero()
        for places in tqdm(chunks[:, self.accelerator.process_index], "reference", disable=quiet):
            of_batch = compared[places % len(compared)]
            batch = self._prepare_inputs(self.data_collator(rows.select(of_batch).to_list()))
            with torch.no_grad(), self.accelerator.autocast():  # as in the policy's forward pass
                logprobs = self.forward(model, module, batch)["logprobs"].cpu().numpy()
            for place, row, numbers in zip(places, of_batch, split_by_row(logprobs, sizes[of_batch]), strict=True):
                if place < len(compared):
                    yield row, numbers

    @contextlib.contextmanager
    def _reference_model(self) -> Iterator[tuple[nn.Module, PreTrainedModel]]:
        """Yield the reference in eval mode: the model to call, and the causal LM inside it."""
        self.model.eval()  # the first step switches back
        policy = self.args.run_settings["model_name_or_path"]
        reference = self.args.run_settings["ref_model_name_or_path"]
        if self.args.lora_rank:
            with self.model.disable_adapter():
                yield self.model_wrapped, self.module
        elif self.state.global_step == 0 and policy["sha256"] == reference["sha256"]:
            yield self.model_wrapped, self.module
        else:
            model = self._load_reference_model()
            module = getattr(model, "module", model)
            yield model, module
            if is_deepspeed_zero3_enabled():  # DeepSpeed keeps the model alive, so free its weights
                for weights in module.parameters():
                    weights.ds_tensor.data = weights.ds_tensor.data.new_empty(0)

    def _load_reference_model(self) -> nn.Module:
        """Load the frozen reference in eval mode on the device, partitioned by a DeepSpeed engine under ZeRO-3."""
        model = load_for_training(self.args.ref_model_name_or_path, **self.args.loading).requires_grad_(False).eval()
        if not is_deepspeed_zero3_enabled():
            return model.to(self.args.device)
        import deepspeed

        policy_config = self.accelerator.state.deepspeed_plugin.deepspeed_config
        kept = ("bf16", "fp16", "steps_per_print")
        config = {name: value for name, value in policy_config.items() if name in kept}
        zero = dict(policy_config["zero_optimization"])
        zero.pop("offload_optimizer", None)
        zero = {name: value for name, value in zero.items() if value != "auto"}
        config |= {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        engine.eval()
        return engine

    def _save_checkpoint(self, model, trial):
        """Write COMPLETE once every rank has written its part; only then delete older checkpoints."""
        self.check_finite()
        folder = Path(self.args.output_dir)
        limit = self.args.save_total_limit
        self.args.save_total_limit = None
        super()._save_checkpoint(model, trial)
        self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # ranks write to the same folder
        if self.args.should_save:
            checkpoint = folder / f"checkpoint-{self.state.global_step}"
            make_weights_readable(checkpoint)
            (checkpoint / COMPLETE).touch()
            for old in old_checkpoints(folder, limit, self.state.best_model_checkpoint):
                delete_checkpoint(old)

    def check_finite(self) -> None:
        """UserError if any micro-batch's loss was NaN or infinite. All ranks must call this.

        Then neither a checkpoint nor a model is written; earlier checkpoints stay.
        """
        if self.accelerator.reduce(self.not_finite).item():
            step = self.state.global_step
            raise UserError(f"the loss was NaN or infinite at or before step {step}; no model is saved")

    def check_weights(self) -> None:
        """UserError if a weight is NaN or infinite, for example after the last step. All ranks must call this."""
        parts = (getattr(weights, "ds_tensor", weights) for weights in self.model.parameters())  # ds_tensor: ZeRO-3
        bad = any(not part.isfinite().all() for part in parts)
        if self.accelerator.reduce(torch.tensor(float(bad), device=self.args.device)).item():
            raise UserError(f"weights are NaN or infinite after step {self.state.global_step}; no model is saved")

    def create_model_card(self, **_) -> None:
        """Write OUTPUT_DIR/README.md. The Trainer calls this before it uploads, too."""
        if self.is_world_process_zero():
            self.write_card(Path(self.args.output_dir))

    def write_card(self, folder: Path, *, merged: bool = False) -> None:
        args = self.args
        kinds = column(self.train_dataset, "kind")
        rows = f"{len(kinds):,} rows"
        if self.learns_from_games:
            rows = ", ".join(f"{(kinds == kind).sum():,} {name}" for kind, name in KINDS.items())
        coefficients = {name: getattr(args, name) for name in self.flags}
        if self.averages_rows:
            coefficients["loss_normalization"] = args.loss_normalization
        write_card(
            folder,
            base=args.model_name_or_path,
            reference=args.ref_model_name_or_path if self.compared_kinds else None,
            method=args.train_method,
            coefficients=coefficients,
            lora_rank=args.lora_rank,
            merged=merged,
            data=args.train_data_path,
            rows=rows,
        )

    def log(self, logs, start_time=None):
        """Log these values and, if they include a loss, our metrics since the last log. All ranks get the same values.

        The Trainer provides `loss`, a mean over these steps, their micro-batches and all ranks, and the last step's
        `learning_rate` and `grad_norm` (before clipping). Logs are stored in trainer_state.json.
        """
        if "loss" in logs:
            self.check_finite()
            logs |= self.metrics.take(self.accelerator)
        super().log(logs, start_time)


KL_HELP = "beta: coefficient of the KL to the reference model."
# The defaults of beta, alpha and epsilon below are the paper's.


class SFTTrainer(SPAGTrainer):
    """Cross-entropy over all target tokens of the optimizer step."""

    averages_rows = False  # as transformers' own cross-entropy
    reads_weights = False

    def method_loss(self, batch, denominators):
        return sft_loss(batch["logprobs"], num_scored(batch), denominators["tokens"]), {}


class SFTwithKLTrainer(SPAGTrainer):
    """Imitation learning."""

    flags: ClassVar = {"lm_kl_coeff": flag(KL_HELP, default=0.1)}
    compared_kinds = (*KINDS,)

    def method_loss(self, batch, denominators):
        return sft_kl_loss(
            batch["logprobs"],
            batch["ref_logprobs"],
            batch["weights"],
            num_rows=denominators["rows"],
            **self.coefficients(self.args),
        )


class OfflinePOTrainer(SPAGTrainer):
    """Self-play learning."""

    flags: ClassVar = {
        "lm_kl_coeff": flag(KL_HELP, default=0.2),
        "lm_sft_coeff": flag("alpha: coefficient of the SFT rows' loss.", default=0.5),
        "clip_range": flag("epsilon: the importance ratio is clipped to [1 - epsilon, 1 + epsilon].", default=0.2),
        "detach_kl": flag("Stop the gradient through the KL inside the advantage.", default=False),
    }
    compared_kinds = (GAME,)
    learns_from_games = True

    def method_loss(self, batch, denominators):
        return offline_po_loss(
            batch["logprobs"],
            batch["ref_logprobs"],
            batch["rewards"],
            batch["weights"],
            batch["sft_mask"],
            num_game_rows=denominators["game_rows"],
            num_sft_rows=denominators["sft_rows"],
            **self.coefficients(self.args),
        )


TRAIN_METHODS: dict[str, type[SPAGTrainer]] = {
    "SFT": SFTTrainer,
    "SFTwithKL": SFTwithKLTrainer,
    "OfflinePO": OfflinePOTrainer,
}
