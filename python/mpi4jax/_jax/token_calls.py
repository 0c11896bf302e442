"""Calls whose only operand is a token get a second operand.

XLA takes such a call for one without operands: it inlines it before all else,
and has each instruction from inside depend on the token. What depends so is never removed, so
simplifying it does not end, and XLA aborts the process.
"""

from __future__ import annotations

from jaxlib.mlir import ir

_TOKEN = "!stablehlo.token"


def widen(module: ir.Module) -> None:
    """Give the functions of a lowered module that take one token, and nothing else, two."""
    with module.context:
        symbols = {f.name.value: f for f in module.body if f.operation.name == "func.func"}
        names = {
            name
            for name, f in symbols.items()
            if len(f.type.inputs) == 1 and str(f.type.inputs[0]) == _TOKEN and not f.is_external
        }
        calls = _calls(module.operation, names) if names else []
        for name in {_callee(call) for call in calls}:
            _widen_function(symbols[name])
        for call in calls:
            _widen_call(call)


def _callee(call: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def _calls(inside: ir.Operation, names: set[str]) -> list[ir.Operation]:
    found = []
    for region in inside.regions:
        for block in region:
            for op in block:
                operation = op.operation
                if operation.name == "func.call" and _callee(operation) in names:
                    found.append(operation)
                found += _calls(operation, names)
    return found


def _widen_function(f: ir.Operation) -> None:
    (token,) = f.type.inputs
    (argument,) = f.arguments
    f.entry_block.add_argument(token, argument.location)
    f.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get([token, token], f.type.results)
    )
    if "arg_attrs" in f.attributes:
        (first,) = ir.ArrayAttr(f.attributes["arg_attrs"])
        f.attributes["arg_attrs"] = ir.ArrayAttr.get([first, first])


def _widen_call(call: ir.Operation) -> None:
    (token,) = call.operands
    named = [call.attributes[i] for i in range(len(call.attributes))]
    wide = ir.Operation.create(
        call.name,
        results=[result.type for result in call.results],
        operands=[token, token],
        attributes={a.name: a.attr for a in named},
        loc=call.location,
        ip=ir.InsertionPoint(call),
    )
    for old, new in zip(call.results, wide.results, strict=True):
        old.replace_all_uses_with(new)
    call.erase()
