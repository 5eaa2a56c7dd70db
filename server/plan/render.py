"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from server.kvpool.layout import AttentionKind
from server.plan.answer import LayerGroup, Plan
from server.plan.caches import CacheChoice


def render(plan: Plan) -> str:
    """The plan as text for people."""
    longest = plan.caches[0].fits[-1].tokens
    tables = [
        _header(plan),
        _table(
            "Sequences at once, by what the cache keeps (* as above)",
            ("", "cache", "B a token", "longest alone", *(f"{fit.tokens:,} tokens" for fit in plan.caches[0].fits)),
            [
                (
                    "*" if choice.planned else "",
                    _name(choice),
                    f"{choice.bytes_per_token:,}",
                    "any" if choice.longest is None else f"{choice.longest:,}",
                    *(f"{fit.sequences:,}" for fit in choice.fits),
                )
                for choice in plan.caches
            ],
            names=2,
        ),
        _table(
            "The same layers, heads shared otherwise (* as it is)",
            ("", "kind", "KV heads", "B a token", f"{longest:,} tokens", "tokens that fit"),
            [
                (
                    "*" if row.own else "",
                    row.kind,
                    f"{row.kv_heads}",
                    f"{row.bytes_per_token:,}",
                    _size(row.longest_bytes),
                    f"{row.tokens:,}",
                )
                for row in plan.sharing
            ],
            names=2,
        ),
    ]
    if plan.waste:
        mean = sum(plan.lengths) / len(plan.lengths)
        tables.append(
            _table(
                f"{len(plan.lengths):,} sequences of {min(plan.lengths):,} to {max(plan.lengths):,} tokens, "
                f"{mean:,.0f} on average",
                ("allocator", "takes", "fills", "wastes", "at once"),
                [
                    (
                        row.allocator,
                        _size(row.allocated_bytes),
                        _size(row.used_bytes),
                        f"{row.waste_ratio:.1%}",
                        f"{row.at_once:,}",
                    )
                    for row in plan.waste
                ],
                names=1,
            )
        )
    return "\n\n".join(tables)


def _header(plan: Plan) -> str:
    lines = [("Model", f"{plan.model} ({plan.model_type})")]
    lines += [("Layers" if index == 0 else "", _describe(group)) for index, group in enumerate(plan.layers)]
    of_layers = (
        ""
        if plan.layers_per_block == sum(group.layers for group in plan.layers)
        else f" in {plan.layers_per_block} layers"
    )
    lines.append(
        (
            "Cache",
            f"{plan.bytes_per_token:,} B a token in {plan.cache_dtype}, {_size(plan.bytes_per_block)} a block of "
            f"{plan.block_size} tokens{of_layers}",
        )
    )
    counted = "" if plan.weight_parameters is None else f"{plan.weight_parameters:,} parameters, "
    lines.append(("Weights", f"{_size(plan.weight_bytes)} ({counted}from {plan.weight_source})"))
    lines.append(
        (
            "Memory",
            f"{_size(plan.memory_bytes)} less the weights, {plan.utilization:g} of the rest: "
            f"{_size(plan.cache_bytes)} of cache, {plan.blocks:,} blocks, {plan.tokens:,} tokens",
        )
    )
    if plan.host is not None:
        lines.append(
            (
                "Host",
                f"{_size(plan.host.bytes)} of main memory: {plan.host.blocks:,} blocks, {plan.host.tokens:,} tokens of "
                "prefixes more",
            )
        )
    lines += [("Note", note) for note in plan.notes]
    return "\n".join(f"{label:<9}{content}" for label, content in lines)


def _name(choice: CacheChoice) -> str:
    dtypes = " or ".join(choice.dtypes)
    return dtypes if choice.budget is None else f"{dtypes}, H2O of {choice.budget:,}"


def _describe(group: LayerGroup) -> str:
    stored = (
        f"one latent of {group.key_dim}"
        if group.kind == AttentionKind.MLA.value
        else f"{group.kv_heads} KV heads of {group.key_dim}"
        + ("" if group.value_dim == group.key_dim else f" (values {group.value_dim})")
    )
    window = "" if group.window is None else f", window {group.window:,}"
    return (
        f"{group.layers} {group.kind}: {group.heads} heads, {stored}{window}, {group.bytes_per_token:,} B a token each"
    )


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], names: int) -> str:
    """Columns aligned on the right, but the first ones, `names` of them, on the left."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = (
        "  ".join(
            cell.ljust(width) if column < names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    )
    return "\n".join((title, *(f"  {line}" for line in lines)))


def _size(nbytes: int) -> str:
    """Bytes in the largest unit, up to GiB, of which there is at least one."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 3)
    return f"{nbytes:,} B" if power == 0 else f"{nbytes / 1024**power:,.2f} {'KMG'[power - 1]}iB"
