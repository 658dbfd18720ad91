"""A pair on a mesh: the shardings of its arrays, and its programs over all devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

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
        mesh: The mesh that `make_mesh` returned; an abstract one is enough for asking
            for shardings.
        target: The target's rules.
        drafter: The drafter's rules.
    """

    mesh: AnyMesh
    target: Rules
    drafter: Rules = dataclasses.field(default_factory=lambda: WHOLE)

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
        """Returns requests on the mesh, each device's rows on that device."""
        return _put(rows, self.row_shardings(rows))

    def fetch(self, arrays: Any) -> Any:
        """Returns arrays on the host, whole in every process."""
        if jax.process_count() > 1:
            arrays = jax.jit(_as_they_are, out_shardings=self.everywhere)(arrays)
        return jax.device_get(arrays)

    def shard(
        self, program: Program, *, donates_state: bool = False
    ) -> jax.stages.Wrapped:
        """Compiles a program for all devices.

        Each device of the data axis runs its own rows as if there were no others, and
        is done when they are; only the tensor axes are left to the compiler.

        Args:
            program: The program, whose static arguments are bound already.
            donates_state: Whether the memory of the state is given away.

        Returns:
            The program on arrays sharded as this sharding says. Keep it to call it
            again: every call of `shard` returns one that is compiled anew.
        """

        def run(params: Any, rows: Any) -> Any:
            by_row = PartitionSpec(DATA)
            results = jax.shard_map(
                program,
                mesh=self.mesh,
                in_specs=(PartitionSpec(), by_row),
                out_specs=by_row,
                axis_names={DATA},
                # Loops begin with constants, which the check takes for another type.
                check_vma=False,
            )(params, rows)
            shardings = self.row_shardings(results)
            return jax.lax.with_sharding_constraint(results, shardings)

        return jax.jit(run, donate_argnums=(1,) if donates_state else ())


def _as_they_are(arrays: Any) -> Any:
    return arrays


def _put(arrays: Any, shardings: Any) -> Any:
    """Returns arrays, which every process has whole, sharded as given."""
    if jax.process_count() == 1:
        return jax.device_put(arrays, shardings)
    return jax.tree.map(_put_part, arrays, shardings)


def _put_part(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array, which every process has whole, on the devices of all."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = _put_part(jax.random.key_data(array), sharding)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(array))
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


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
        devices: The devices of a machine that is not at hand; `None` for all that are.

    Raises:
        InputError: If the mesh cannot split the target, as `check_mesh` says.
    """
    num_devices = jax.device_count() if devices is None else len(devices)
    check_mesh(shape, target, batch_size=batch_size, num_devices=num_devices)
    mesh = make_mesh(shape, target.layer.num_kv_heads, devices)
    return PairSharding(mesh=mesh, target=split_rules(mesh, target.layer))
