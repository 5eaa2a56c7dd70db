"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from server.kvpool.layout import AttentionKind
from server.plan.answer import LayerGroup, Plan


def render(plan: Plan) -> str:
    """The plan as text for people."""
    lines = [("Model", f"{plan.model} ({plan.model_type})")]
    lines += [("Layers" if index == 0 else "", _describe(group)) for index, group in enumerate(plan.layers)]
    lines.append(
        (
            "Cache",
            f"{plan.bytes_per_token:,} B a token in {plan.dtype}, {_size(plan.bytes_per_block)} a block of "
            f"{plan.block_size} tokens",
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
    lines += [("Note", note) for note in plan.notes]
    text = "\n".join(f"{label:<9}{content}" for label, content in lines)
    longest = plan.fits[-1].tokens
    tables = [
        _table(
            "Sequences at once",
            ("tokens each", "size each", "sequences"),
            [(f"{fit.tokens:,}", _size(fit.bytes), f"{fit.sequences:,}") for fit in plan.fits],
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
                    _size(row.bytes_per_token * longest),
                    f"{row.tokens:,}",
                )
                for row in plan.sharing
            ],
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
            )
        )
    return "\n\n".join((text, *tables))


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


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned on the right, except a first one of names."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    left = not rows[0][0][:1].isdigit()
    lines = (
        "  ".join(
            cell.ljust(width) if left and column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    )
    return "\n".join((title, *(f"  {line}" for line in lines)))


def _size(nbytes: int) -> str:
    """Bytes in the largest unit, up to GiB, of which there is at least one."""
    power = min(max(nbytes.bit_length() - 1, 0) // 10, 3)
    return f"{nbytes:,} B" if power == 0 else f"{nbytes / 1024**power:,.2f} {'KMG'[power - 1]}iB"
