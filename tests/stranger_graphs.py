"""Small graphs of the shapes that are met in the wild, a few kB each: what ONNX Runtime runs, adopting has to take.

`CASES` is the table. Weights are random, and the same every time.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper
from stranger_builder import Cases, Net
from stranger_layers import LAYERS
from stranger_loops import LOOPS
from stranger_sound import SOUND
from stranger_texts import TEXTS

CASES = Cases()


# Shapes and annotations


def small(net: Net, x: str) -> None:
    """Convolution, batch norm, ReLU, convolution, classifier."""
    y = net.node("Relu", net.norm(net.conv(x, 3, 8, bias=False), 8))
    net.head(net.node("Relu", net.conv(y, 8, 8)), 8)


@CASES.add("nothing odd at all")
def ordinary(net: Net) -> None:
    small(net, net.x(2, 3, 8, 8))


@CASES.add("batch, height and width have names")
def symbolic_sizes(net: Net) -> None:
    small(net, net.x(2, 3, 8, 8, declared=["batch", 3, "height", "DynamicDimension.2"]))


@CASES.add("sizes written as -1")
def sizes_of_minus_one(net: Net) -> None:
    small(net, net.x(2, 3, 8, 8, declared=[-1, 3, -1, -1]))


@CASES.add("sizes left out, but not their number")
def sizes_left_out(net: Net) -> None:
    small(net, net.x(2, 3, 8, 8, declared=[None, 3, None, None]))


@CASES.add("an output said to have sizes of 0")
def output_size_of_zero(net: Net) -> None:
    small(net, net.x(2, 3, 8, 8))
    net.outputs[0].CopyFrom(helper.make_tensor_value_info(net.outputs[0].name, TensorProto.FLOAT, [0, 0]))


@CASES.add("inputs without any shape")
def no_shape(net: Net) -> None:
    small(net, net.x(2, 3, 8, 8, declared=None))


@CASES.add("nodes in the wrong order")
def nodes_out_of_order(net: Net) -> None:
    small(net, net.x(2, 3, 8, 8))
    net.nodes.reverse()


@CASES.add("shapes noted in the file that are not so")
def stale_shapes(net: Net) -> None:
    x = net.x(2, 3, 8, 8, declared=["n", 3, "h", "w"])
    y = net.conv(x, 3, 8)
    net.noted.append(helper.make_tensor_value_info(y, TensorProto.FLOAT, [1, 8, 32, 320]))
    net.head(net.node("Relu", y), 8)


@CASES.add("an output said to have another number of sizes than it has")
def wrong_output_shape(net: Net) -> None:
    x = net.x(1, 6, 12)
    net.output(net.node("Transpose", net.dense(x, 12, 9), perm=[1, 0, 2]), [1, "seqlen"])


@CASES.add("nodes without names, a weight that nothing uses, a name in another alphabet")
def careless_names(net: Net) -> None:
    x = net.x(2, 3, 8, 8)
    net.weight(4, 4)
    net.head(net.node("Relu", net.conv(x, 3, 8), out=["значение/1:0"]), 8)
    for node in net.nodes:
        node.name = ""


@CASES.add("weights listed as inputs too, as in IR 3", opset=8, ir=3)
def weights_as_inputs(net: Net) -> None:
    small(net, net.x(2, 3, 8, 8))
    net.inputs += [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in net.held]


def _version(opset: int, ir: int) -> None:
    def written(net: Net) -> None:
        x = net.x(2, 3, 8, 8)
        y = net.node("Relu", net.norm(net.conv(x, 3, 8, bias=False), 8))
        y = net.node("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2])
        y = net.node("Flatten", y)
        y = net.node("Gemm", y, net.weight(6, 128), net.weight(6), transB=1)
        net.output(net.node("Softmax", y, axis=1))

    written.__name__ = f"version_{opset}"
    CASES.add(f"operators of version {opset}", opset=opset, ir=ir)(written)


for _opset, _ir in ((7, 3), (9, 4), (11, 6), (13, 7), (15, 8), (17, 8), (19, 9), (21, 10), (23, 11)):
    _version(_opset, _ir)


# Numbers


@CASES.add("everything in float16, inputs and outputs too")
def half_file(net: Net) -> None:
    x = net.input("x", net.draw(2, 3, 8, 8, dtype=np.float16, spread=1.0))
    y = net.node("Conv", x, net.weight(8, 3, 3, 3, dtype=np.float16), net.weight(8, dtype=np.float16), pads=[1] * 4)
    y = net.node("GlobalAveragePool", net.node("Relu", y))
    y = net.node("Gemm", net.node("Flatten", y), net.weight(5, 8, dtype=np.float16), transB=1)
    net.output(y, kind=TensorProto.FLOAT16)


@CASES.add("float32 outside, float16 inside")
def half_inside(net: Net) -> None:
    x = net.node("Cast", net.x(4, 16), to=TensorProto.FLOAT16)
    y = net.node("MatMul", x, net.weight(16, 16, dtype=np.float16))
    net.output(net.dense(net.probe(net.node("Cast", net.node("Relu", y), to=TensorProto.FLOAT)), 16, 6))


@CASES.add("a detour through double")
def double_inside(net: Net) -> None:
    y = net.node("Cast", net.dense(net.x(4, 16), 16, 12), to=TensorProto.DOUBLE)
    y = net.node("Cast", net.node("Sqrt", net.node("Abs", y)), to=TensorProto.FLOAT)
    net.output(net.dense(y, 12, 6))


@CASES.add("minus infinity where a mask is closed")
def infinite_mask(net: Net) -> None:
    x = net.x(2, 6, 8)
    q, k = net.dense(x, 8, 8), net.dense(x, 8, 8)
    seen = net.hold(np.tril(np.ones((6, 6), bool)))
    closed = net.hold(np.array(-np.inf, np.float32))
    scores = net.node("Where", seen, net.node("MatMul", q, net.node("Transpose", k, perm=[0, 2, 1])), closed)
    y = net.node("MatMul", net.node("Softmax", scores, axis=-1), net.dense(x, 8, 8))
    net.output(net.dense(y, 8, 4))


@CASES.add("a channel that is always zero, and an activation that never changes")
def dead_values(net: Net) -> None:
    x = net.x(2, 3, 8, 8)
    weight = net.draw(8, 3, 3, 3)
    weight[2] = 0
    y = net.node("Relu", net.node("Conv", x, net.hold(weight), pads=[1] * 4))
    zero = net.node("Relu", net.node("Neg", y))
    net.head(net.node("Add", y, net.conv(zero, 8, 8, bias=False)), 8)


# Inputs and outputs


@CASES.add("two inputs, two outputs, one of them integers")
def several_ends(net: Net) -> None:
    left = net.input("left", net.draw(2, 8, spread=1.0))
    right = net.input("right", net.draw(2, 6, spread=3.0))
    y = net.node("Relu", net.node("Concat", net.dense(left, 8, 8), net.dense(right, 6, 8), axis=1))
    net.output(net.dense(y, 16, 7))
    net.output(net.node("ArgMax", y, axis=1, keepdims=0), kind=TensorProto.INT64)


@CASES.add("int64 input into a table of word vectors")
def words_in(net: Net) -> None:
    ids = net.input("ids", net.rng.integers(0, 20, (2, 6)), ["batch", "length"])
    y = net.node("Gather", net.weight(20, 8), ids)
    net.output(net.dense(net.node("ReduceMean", y, axes=[1], keepdims=0), 8, 4))


@CASES.add("int32 input made one-hot by comparison")
def bytes_in(net: Net) -> None:
    ids = net.input("bytes", net.rng.integers(0, 12, (2, 10)).astype(np.int32), ["unk__1", 10])
    same = net.node(
        "Equal", net.node("Unsqueeze", ids, net.hold(np.array([2]))), net.hold(np.arange(12, dtype=np.int32))
    )
    y = net.node("Transpose", net.dense(net.node("Cast", same, to=TensorProto.FLOAT), 12, 8), perm=[0, 2, 1])
    y = net.node("Conv", y, net.weight(8, 8, 5), kernel_shape=[5])
    net.output(net.dense(net.node("Squeeze", net.node("GlobalMaxPool", y), net.hold(np.array([2]))), 8, 6))


@CASES.add("scalars as inputs, an output in double")
def scalars_in(net: Net) -> None:
    x = net.x(1, 16, declared=[1, "samples"])
    low, high = (net.input(name, np.array(v, np.float32)) for name, v in (("low", -1.0), ("high", 1.5)))
    y = net.dense(net.node("Clip", x, low, high), 16, 8)
    net.output(net.node("Cast", y, to=TensorProto.DOUBLE), kind=TensorProto.DOUBLE)


@CASES.add("boxes in pixels (0 to 640) and scores (0 to 1) in one tensor", columns=(slice(0, 4), slice(4, None)))
def boxes_and_scores(net: Net) -> None:
    y = net.node("Relu", net.conv(net.x(1, 3, 8, 8), 3, 8))
    flat = net.hold(np.array([1, -1, 64]))
    boxes = net.node("Reshape", net.conv(y, 8, 4, 1), flat)
    boxes = net.node("Mul", net.node("Sigmoid", boxes), net.hold(np.float32(640)))
    scores = net.node("Sigmoid", net.node("Reshape", net.conv(y, 8, 3, 1), flat))
    net.output(net.node("Transpose", net.node("Concat", boxes, scores, axis=1), perm=[0, 2, 1]))


# What must be refused


def _grid(net: Net, x: str, scale: float, kind: type[np.generic], zero: int = 0) -> str:
    held = net.hold(np.float32(scale)), net.hold(np.array(zero, kind))
    return str(net.node("DequantizeLinear", net.node("QuantizeLinear", x, *held), *held))


@CASES.add("quantized already: activations and weights between QuantizeLinear and DequantizeLinear",
           expect="quantized already")  # fmt: skip
def quantized_pairs(net: Net) -> None:
    x = _grid(net, net.x(2, 3, 8, 8), 0.02, np.uint8, 128)
    weight = net.hold(net.rng.integers(-100, 100, (8, 3, 3, 3)).astype(np.int8))
    weight = net.node("DequantizeLinear", weight, net.hold(np.float32(0.01)), net.hold(np.int8(0)))
    net.head(_grid(net, net.node("Relu", net.node("Conv", x, weight, pads=[1] * 4)), 0.05, np.uint8), 8)


@CASES.add("quantized already: QLinearConv", expect="quantized already")
def quantized_operators(net: Net) -> None:
    scale, zero = net.hold(np.float32(0.02)), net.hold(np.uint8(128))
    x = net.node("QuantizeLinear", net.x(2, 3, 8, 8), scale, zero)
    weight = net.hold(net.rng.integers(-100, 100, (8, 3, 3, 3)).astype(np.int8))
    y = net.node("QLinearConv", x, scale, zero, weight, net.hold(np.float32(0.01)), net.hold(np.int8(0)), scale, zero,
                 pads=[1] * 4)  # fmt: skip
    net.output(net.node("DequantizeLinear", y, scale, zero))


@CASES.add("quantized already: DynamicQuantizeLinear and MatMulInteger", expect="quantized already")
def quantized_on_the_fly(net: Net) -> None:
    x, scale, zero = net.node("DynamicQuantizeLinear", net.x(4, 16), n=3)
    weight = net.hold(net.rng.integers(-100, 100, (16, 6)).astype(np.int8))
    y = net.node("Cast", net.node("MatMulInteger", x, weight, zero, net.hold(np.int8(0))), to=TensorProto.FLOAT)
    net.output(net.node("Mul", y, net.node("Mul", scale, net.hold(np.float32(0.01)))))


@CASES.add("no layer at all", expect="nothing")
def no_layer(net: Net) -> None:
    net.output(net.node("Softmax", net.node("Mul", net.x(4, 16), net.hold(np.float32(3))), axis=1))


@CASES.add("layers, but none with a constant weight", expect="nothing")
def no_weight(net: Net) -> None:
    left, right = net.input("left", net.draw(2, 4, 6, spread=1.0)), net.input("right", net.draw(2, 6, 4, spread=1.0))
    net.output(net.node("MatMul", left, right))


@CASES.add("operators that came later: RMSNormalization, Attention, Swish", opset=24, ir=11)
def later_operators(net: Net) -> None:
    x = net.node("RMSNormalization", net.dense(net.x(2, 4, 16), 16, 16), net.hold(np.ones(16, np.float32)))
    query, key, value = (net.dense(x, 16, 16) for _ in range(3))
    y = net.node("Attention", query, key, value, q_num_heads=2, kv_num_heads=2)
    net.output(net.dense(net.node("Swish", net.dense(y, 16, 16)), 16, 5))


@CASES.add("operators of a later version that only learned about more types", opset=22, ir=10)
def later_version(net: Net) -> None:
    y = net.node("GlobalMaxPool", net.node("Relu", net.norm(net.conv(net.x(2, 3, 8, 8), 3, 8), 8)))
    net.output(net.node("Gemm", net.node("Flatten", y), net.weight(5, 8), transB=1))


@CASES.add("a later operator that cannot be said in other words, in a file with layers", opset=26, ir=11)
def later_operator(net: Net) -> None:
    y = net.node("CumProd", net.node("Sigmoid", net.dense(net.x(4, 16), 16, 12)), net.hold(np.array(1, np.int64)))
    net.output(net.dense(y, 12, 6))


@CASES.add("an input of unsigned whole numbers")
def unsigned_input(net: Net) -> None:
    ids = net.input("ids", net.rng.integers(0, 20, (2, 7)).astype(np.uint32))
    y = net.node("Gather", net.weight(20, 16), net.node("Cast", ids, to=TensorProto.INT64))
    net.output(net.dense(net.node("Relu", net.dense(y, 16, 12)), 12, 6))


@CASES.add("a classifier as scikit-learn writes it: scores as a list of dictionaries", opset=17)
def scores_by_class(net: Net) -> None:
    x = net.x(4, 10)
    y = net.node("Relu", net.node("Add", net.dense(x, 10, 32), net.weight(1, 32)))
    scores = net.node("Softmax", net.dense(y, 32, 3), axis=1)
    net.output(net.node("ArgMax", scores, axis=1, keepdims=0), None, TensorProto.INT64)
    zipped = net.node("ZipMap", scores, domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    net.outputs.append(helper.make_value_info(zipped, helper.make_sequence_type_proto(kind)))


@CASES.add("trees, which have nothing to quantize", expect="nothing")
def trees(net: Net) -> None:
    nodes = {"nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0]}
    nodes |= {"nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_values": [0.5, 0.0, 0.0]}
    nodes |= {"nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "n_targets": 1}
    leaves = {"target_treeids": [0, 0], "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.0, 2.0]}
    net.output(net.node("TreeEnsembleRegressor", net.x(4, 3), domain="ai.onnx.ml", **nodes, **leaves))


@CASES.add("a linear classifier of scikit-learn, whose file names no version of the usual operators", expect="nothing")
def only_classical(net: Net) -> None:
    about = {"coefficients": [1.0, -1.0, 0.5, 0.2], "intercepts": [0.1, -0.1], "classlabels_ints": [0, 1]}
    scores = net.node("LinearClassifier", net.x(4, 2), n=2, domain="ai.onnx.ml", **about)[1]
    zipped = net.node("ZipMap", scores, domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    net.outputs.append(helper.make_value_info(zipped, helper.make_sequence_type_proto(kind)))
    net.finished = net.model()
    del net.finished.opset_import[0]


@CASES.add("names that others begin with, as older PyTorch writes them: result and result.1")
def names_with_dots(net: Net) -> None:
    y = net.node("Relu", net.conv(net.x(2, 3, 8, 8), 3, 8), out=["result"])
    for i in range(1, 4):
        y = net.node("Relu", net.conv(y, 8, 8), out=[f"result.{i}"])
    y = net.node("Sigmoid", net.conv(y, 8, 8), out=["result.exact"])
    net.head(net.node("Add", y, net.hold(net.draw(1, 8, 1, 1), "result.scale")), 8)
    net.output(net.node("Tanh", "result.1", out=["result.zero"]))


CASES.update(LAYERS)
CASES.update(LOOPS)
CASES.update(SOUND)
CASES.update(TEXTS)
