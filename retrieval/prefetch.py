"""Ask for memory before it is needed.

Where many sessions take turns, what a step looks at has been pushed out of the near caches since the session's last
turn, and a draft walks from hash table to row to list: each next address is known only when the last load has come.
But many of these walks are independent, and their first addresses are known long before their turn. `prefetch` tells the
processor to fetch such a line meanwhile; it changes nothing and waits for nothing.

It pays where a chain is about to be walked or a jump depends on what comes: a step of 64 sessions, in process, takes more
than a third less than without.
Where all is near already every call costs a nanosecond. Tried and without gain: looking up in two tries side by side,
walking lists ahead, asking for the next session of a batch, growing the trees of four sessions in turns.
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

__all__ = ["prefetch"]

if numba.config.DISABLE_JIT:

    def prefetch(array, row):
        """Nothing, where nothing is compiled."""

else:

    @intrinsic
    def prefetch(typing_context, array, row):
        """Fetch the line of memory in which array[row] begins; `row` need not be valid."""

        def codegen(context, builder, signature, arguments):
            found = context.make_array(signature.args[0])(context, builder, arguments[0])
            stride = cgutils.unpack_tuple(builder, found.strides)[0]
            byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
            address = builder.gep(builder.bitcast(found.data, byte), [builder.mul(arguments[1], stride)])
            wanted = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
            function = builder.module.declare_intrinsic("llvm.prefetch", [byte], wanted)
            builder.call(function, [address, number(0), number(3), number(1)])  # to read, into all caches, data
            return context.get_dummy_value()

        return types.void(array, types.intp), codegen
