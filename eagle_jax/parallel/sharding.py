"""A pair on a mesh: the shardings of its arrays, and its programs over all devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel.mesh import DATA, MeshShape, check_mesh, make_mesh
from eagle_jax.parallel.rules import (
    WHOLE,
    AnyMesh,
    Rules,
    draft_rules,
    param_shardings,
    row_shardings,
    split_rules,
)

Program = Callable[..., Any]
"""A function from weights and requests, or a state, to states or parts of them.

In all but the weights the first axis of every array is `B`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairSharding:
    """The shardings of a pair's arrays.

    Attributes:
        mesh: The mesh that `make_mesh` returned, or one with its axes, whose placement
            is left to the compiler even if they are explicit; an abstract one is enough
            for asking for shardings.
        target: The target's rules.
        drafter: The drafter's rules.
    """

    mesh: AnyMesh
    target: Rules
    drafter: Rules = dataclasses.field(default_factory=lambda: WHOLE)

    def __post_init__(self) -> None:
        """Leaves all axes to the compiler: the models do not name their shardings."""
        kinds = (AxisType.Auto,) * len(self.mesh.axis_names)
        object.__setattr__(self, "mesh", self.mesh.update(axis_types=kinds))

    def with_drafter(self, layer: LayerConfig | None, params: Any) -> "PairSharding":
        """Returns the sharding of the target with a model that drafts for it.

        Args:
            layer: The sizes of the draft model's layers; `None` if it has none.
            params: The draft model's weights, or their shapes.
        """
        rules = draft_rules(self.mesh, layer, params)
        return dataclasses.replace(self, drafter=rules)

    def target_shardings(self, params: Any) -> Any:
        """Returns the shardings of the target's weights, or of their shapes."""
        return param_shardings(self.mesh, self.target, params)

    def drafter_shardings(self, params: Any) -> Any:
        """Returns the shardings of the drafter's weights, or of their shapes."""
        return param_shardings(self.mesh, self.drafter, params)

    def row_shardings(self, rows: Any) -> Any:
        """Returns the shardings of requests or states."""
        return row_shardings(self.mesh, self.target, self.drafter, rows)

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array that is whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put_rows(self, rows: Any) -> Any:
        """Returns requests on the mesh, each device's rows on that device.

        Args:
            rows: The requests, which every process has whole.
        """
        return _move(rows, self.row_shardings(rows))

    def fetch(self, arrays: Any) -> Any:
        """Returns arrays on the host, whole in every process."""
        if jax.process_count() > 1:
            arrays = _move(arrays, self.everywhere)
        return jax.device_get(arrays)

    def shard(
        self, program: Program, *, donates_state: bool = False
    ) -> jax.stages.Wrapped:
        """Compiles a program for all devices.

        Each device of the data axis runs its own rows as if there were no others, and
        is done when they are; only the tensor axes are left to the compiler.

        Args:
            program: The program of weights, rows, and any arrays that every device has
                whole; its static arguments are bound already.
            donates_state: Whether the memory of the state is given away.

        Returns:
            The program on arrays sharded as this sharding says. Keep it to call it
            again: every call of `shard` returns one that is compiled anew.
        """

        def run(params: Any, rows: Any, *whole: Any) -> Any:
            by_row, everywhere = PartitionSpec(DATA), PartitionSpec()
            mapped = jax.shard_map(
                program,
                mesh=self.mesh,
                in_specs=(everywhere, by_row, *[everywhere] * len(whole)),
                out_specs=by_row,
                axis_names={DATA},
                # Loops begin with constants, which the check takes for another type.
                check_vma=False,
            )
            # The caller may work within a mesh of explicit axes.
            with use_abstract_mesh(self.mesh.abstract_mesh):
                results = mapped(params, rows, *whole)
                shardings = self.row_shardings(results)
                return jax.lax.with_sharding_constraint(results, shardings)

        return jax.jit(run, donate_argnums=(1,) if donates_state else ())


def _move(arrays: Any, shardings: Any) -> Any:
    """Returns arrays sharded as given."""
    if jax.process_count() == 1:
        return jax.device_put(arrays, shardings)
    return jax.jit(lambda arrays: arrays, out_shardings=shardings)(arrays)


def shard_pair(
    shape: MeshShape,
    target: TransformerConfig,
    *,
    batch_size: int,
    devices: Sequence[Any] | None = None,
) -> PairSharding:
    """Returns the sharding of a target.

    Args:
        shape: The mesh's shape.
        target: The target's sizes.
        batch_size: The number of rows of a batch, `B`.
        devices: The devices, of any machine; `None` for all of this one.

    Raises:
        InputError: If the mesh cannot split the target, as `check_mesh` says.
    """
    num_devices = jax.device_count() if devices is None else len(devices)
    check_mesh(shape, target, batch_size=batch_size, num_devices=num_devices)
    mesh = make_mesh(shape, target.layer.num_kv_heads, devices)
    return PairSharding(mesh=mesh, target=split_rules(mesh, target.layer))
