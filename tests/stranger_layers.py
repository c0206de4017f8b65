"""Graphs with odd weights, odd layers and the blocks that mobile networks are made of."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from stranger_builder import Cases, Net

LAYERS = Cases()


# Where weights hide


@LAYERS.add("weights and biases behind Identity nodes")
def weight_behind_identity(net: Net) -> None:
    x = net.x(2, 3, 8, 8)
    held = [net.node("Identity", net.weight(8, 3, 3, 3)), net.node("Identity", net.weight(8))]
    y = net.probe(net.node("Conv", x, *held, pads=[1] * 4))
    net.head(net.node("Relu", y), 8)


@LAYERS.add("a weight behind a Transpose node")
def weight_behind_transpose(net: Net) -> None:
    y = net.node("MatMul", net.x(4, 16), net.node("Transpose", net.weight(12, 16), perm=[1, 0]))
    net.output(net.dense(net.node("Relu", net.probe(y)), 12, 6))


@LAYERS.add("a weight stored in float16 behind a Cast node")
def weight_behind_cast(net: Net) -> None:
    weight = net.node("Cast", net.weight(16, 12, dtype=np.float16), to=TensorProto.FLOAT)
    y = net.probe(net.node("MatMul", net.x(4, 16), weight))
    net.output(net.dense(net.node("Relu", y), 12, 6))


@LAYERS.add("weights in Constant nodes, one of them as a list of floats")
def weight_in_constant(net: Net) -> None:
    weight = net.node("Constant", value=numpy_helper.from_array(net.draw(8, 3, 3, 3)))
    bias = net.node("Constant", value_floats=[float(v) for v in net.draw(8)])
    y = net.probe(net.node("Conv", net.x(2, 3, 8, 8), weight, bias, pads=[1] * 4))
    net.head(net.node("Relu", y), 8)


@LAYERS.add("one weight stored in 8 bits behind DequantizeLinear, the network in floating point")
def weight_behind_dequantize(net: Net) -> None:
    stored = net.hold(net.rng.integers(-100, 100, (16, 12)).astype(np.int8))
    weight = net.node("DequantizeLinear", stored, net.hold(np.float32(0.004)), net.hold(np.int8(0)))
    y = net.probe(net.node("MatMul", net.x(4, 16), weight))
    net.output(net.dense(net.node("Relu", y), 12, 6))


@LAYERS.add("a weight put together by Slice and Concat from a larger one")
def weight_in_pieces(net: Net) -> None:
    whole = net.weight(24, 16)
    parts = [net.node("Slice", whole, net.hold(np.array([a])), net.hold(np.array([a + 6])), net.hold(np.array([0])))
             for a in (12, 0)]  # fmt: skip
    y = net.node("Gemm", net.x(4, 16), net.node("Concat", *parts, axis=0), transB=1)
    net.output(net.dense(net.node("Relu", net.probe(y)), 12, 6))


@LAYERS.add("one weight used by two layers, once turned")
def shared_weight(net: Net) -> None:
    weight = net.weight(16, 16)
    y = net.node("Relu", net.node("Gemm", net.x(4, 16), weight))
    net.output(net.node("Gemm", y, weight, transB=1))


@LAYERS.add("the weight is the left operand")
def weight_at_the_left(net: Net) -> None:
    y = net.probe(net.node("MatMul", net.weight(12, 16), net.x(2, 16, 5)))
    net.output(net.dense(net.node("Transpose", y, perm=[0, 2, 1]), 12, 6))


@LAYERS.add("a weight with three axes, one matrix for every head")
def weight_with_three_axes(net: Net) -> None:
    y = net.probe(net.node("MatMul", net.x(3, 4, 8), net.weight(3, 8, 5)))
    net.output(net.dense(net.node("Relu", y), 5, 5))


@LAYERS.add("a weight with one axis")
def weight_with_one_axis(net: Net) -> None:
    net.output(net.node("MatMul", net.node("Relu", net.dense(net.x(3, 4, 8), 8, 12)), net.weight(12)))


@LAYERS.add("Gemm whose beta is 0 because there is no bias, as tf2onnx writes it")
def gemm_with_beta_of_zero(net: Net) -> None:
    y = net.probe(net.node("Gemm", net.x(4, 16), net.weight(12, 16), transB=1, alpha=1.0, beta=0.0))
    net.output(net.node("Gemm", net.node("Relu", y), net.weight(6, 12), transB=1, beta=0.0))


@LAYERS.add("Gemm with everything set: transA, alpha, beta, a bias with one row")
def gemm_with_everything(net: Net) -> None:
    held = net.weight(16, 12), net.weight(1, 12)
    y = net.node("Gemm", net.x(16, 4), *held, transA=1, alpha=0.5, beta=2.0)
    net.output(net.dense(net.node("Relu", net.probe(y)), 12, 6))


@LAYERS.add("Gemm that adds one number, one row, a matrix, a column")
def gemm_adds_all_kinds(net: Net) -> None:
    y = net.x(4, 16)
    for size in ((1,), (1, 16), (4, 16), (4, 1), ()):
        y = net.node("Relu", net.node("Gemm", y, net.weight(16, 16), net.hold(net.draw(*size)), transB=1))
    net.output(net.dense(y, 16, 6))


@LAYERS.add("nothing but a weight with one axis")
def one_axis_alone(net: Net) -> None:
    net.output(net.probe(net.node("MatMul", net.x(3, 4, 12), net.weight(12))))


@LAYERS.add("a network in double precision")
def double_precision(net: Net) -> None:
    x = net.input("x", net.rng.normal(size=(4, 16)))
    y = net.node("Relu", net.node("Gemm", x, net.weight(16, 12, dtype=np.float64), net.weight(12, dtype=np.float64)))
    y = net.node("MatMul", y, net.node("Constant", value=numpy_helper.from_array(net.draw(12, 5, dtype=np.float64))))
    net.output(y, kind=TensorProto.DOUBLE)


# Biases


@LAYERS.add("the bias is added behind the layer")
def bias_added(net: Net) -> None:
    y = net.node("Add", net.dense(net.x(2, 5, 16), 16, 12), net.weight(12))
    net.output(net.node("Add", net.weight(6), net.dense(net.node("Relu", y), 12, 6)))


@LAYERS.add("the bias goes through Reshape and is added, as converters from Paddle write it")
def bias_reshaped(net: Net) -> None:
    y = net.conv(net.x(2, 3, 8, 8), 3, 8, bias=False)
    bias = net.node("Reshape", net.weight(8), net.hold(np.array([1, -1, 1, 1])))
    net.head(net.node("Relu", net.node("Add", y, bias)), 8)


@LAYERS.add("the bias is computed from constants")
def bias_computed(net: Net) -> None:
    bias = net.node("Mul", net.weight(8), net.hold(np.float32(0.5)))
    y = net.node("Conv", net.x(2, 3, 8, 8), net.weight(8, 3, 3, 3), bias, pads=[1] * 4)
    net.head(net.node("Relu", y), 8)


@LAYERS.add("the bias comes out of the network")
def bias_from_the_network(net: Net) -> None:
    x = net.x(1, 16)
    bias = net.node("Reshape", net.dense(x, 16, 6), net.hold(np.array([6])))
    net.output(net.node("Gemm", net.node("Relu", net.dense(x, 16, 12)), net.weight(12, 6), bias))


# Layers


@LAYERS.add("depthwise and pointwise, as MobileNet")
def depthwise(net: Net) -> None:
    y = net.node("Clip", net.conv(net.x(2, 3, 8, 8), 3, 8), net.hold(np.float32(0)), net.hold(np.float32(6)))
    y = net.node("Relu", net.norm(net.conv(y, 8, 8, group=8, bias=False), 8))
    net.head(net.norm(net.conv(y, 8, 12, 1, bias=False), 12), 12)


@LAYERS.add("dilated, in groups, with a stride, padded by name")
def odd_convolutions(net: Net) -> None:
    y = net.node("Relu", net.conv(net.x(2, 4, 12, 12), 4, 8, group=2, pads=[2, 2, 2, 2], dilations=[2, 2]))
    y = net.node("Conv", y, net.weight(8, 8, 3, 3), strides=[2, 2], auto_pad="SAME_UPPER")
    net.head(net.node("LeakyRelu", y, alpha=0.1), 8)


@LAYERS.add("convolutions over one and over three axes")
def other_numbers_of_axes(net: Net) -> None:
    y = net.node("Conv", net.x(2, 4, 16), net.weight(6, 4, 3), net.weight(6), pads=[1, 1])
    y = net.node("Reshape", net.node("Tanh", net.probe(y)), net.hold(np.array([2, 1, 6, 4, 4])))
    net.head(net.node("Conv", y, net.weight(5, 1, 3, 3, 3)), 5)


@LAYERS.add("transposed convolutions, one of them in groups")
def transposed(net: Net) -> None:
    y = net.node("ConvTranspose", net.x(2, 4, 6, 6), net.weight(4, 8, 2, 2), net.weight(8), strides=[2, 2])
    y = net.node("ConvTranspose", net.node("Relu", net.probe(y)), net.weight(8, 2, 3, 3), group=2, pads=[1] * 4)
    net.output(net.node("Sigmoid", net.conv(y, 4, 1, 1)))


@LAYERS.add("made larger by Resize, with an empty second input and sizes computed from a shape", opset=13)
def resized(net: Net) -> None:
    y = net.node("Relu", net.conv(net.x(1, 3, 8, 8, declared=[1, 3, "h", "w"]), 3, 8))
    small = net.node("AveragePool", y, kernel_shape=[2, 2], strides=[2, 2])
    up = net.node("Resize", small, "", net.hold(np.array([1, 1, 2, 2], np.float32)), mode="nearest")
    again = net.node("Resize", small, "", "", net.node("Shape", y), mode="linear")
    net.head(net.node("Concat", up, again, y, axis=1), 24)


@LAYERS.add("padded in front of the layer: reflected, repeated, with a number")
def padded(net: Net) -> None:
    y, pads = net.x(2, 3, 8, 8), np.array([0, 0, 1, 1, 0, 0, 1, 1])
    for mode, held in (("reflect", []), ("edge", []), ("constant", [net.hold(np.float32(0.3))])):
        y = net.node("Pad", y, net.hold(pads), *held, mode=mode)
        y = net.node("Relu", net.conv(y, 3, 3, pads=[0] * 4))
    net.head(y, 3)


@LAYERS.add("Einsum with a constant, and with two values")
def einsum(net: Net) -> None:
    y = net.probe(net.node("Einsum", net.x(2, 5, 8), net.weight(8, 3, 4), equation="btc,chd->bhtd"))
    y = net.node("Einsum", y, net.node("Tanh", y), equation="bhtd,bhsd->bhts")
    net.output(net.dense(y, 5, 6))


@LAYERS.add("Einsum that puts heads together, with the constant in front, and one that is a product of matrices")
def einsum_of_other_orders(net: Net) -> None:
    y = net.node("Einsum", net.weight(3, 4, 8), net.x(2, 3, 5, 4), equation="hdc, bhtd -> btc")
    y = net.node("Einsum", net.node("Relu", net.probe(y)), net.weight(8, 6), equation="btc,cd->btd")
    net.output(net.node("Einsum", net.node("Relu", y), net.weight(6), equation="btd,d->tb"))


# Blocks


@LAYERS.add("hard-swish by hand: add 3, clip to 6, multiply, divide by 6", opset=11)
def hard_swish(net: Net) -> None:
    y = net.norm(net.conv(net.x(2, 3, 8, 8), 3, 8, bias=False), 8)
    gate = net.node(
        "Clip", net.node("Add", y, net.hold(np.float32(3))), net.hold(np.float32(0)), net.hold(np.float32(6))
    )
    y = net.node("Div", net.node("Mul", y, gate), net.hold(np.float32(6)))
    net.head(net.node("HardSigmoid", net.conv(y, 8, 8), alpha=0.2, beta=0.5), 8)


@LAYERS.add("squeeze-and-excite: a factor for every channel, computed from the mean")
def squeeze_and_excite(net: Net) -> None:
    y = net.node("Relu", net.norm(net.conv(net.x(2, 3, 8, 8), 3, 8, bias=False), 8))
    gate = net.node("Relu", net.conv(net.node("GlobalAveragePool", y), 8, 4, 1))
    y = net.node("Mul", y, net.node("HardSigmoid", net.conv(gate, 4, 8, 1)))
    net.head(net.node("Add", y, net.conv(y, 8, 8)), 8)


@LAYERS.add("channels shuffled by Reshape, Transpose, Reshape, with sizes computed from a shape")
def channel_shuffle(net: Net) -> None:
    y = net.node("Relu", net.conv(net.x(2, 4, 6, 6, declared=["n", 4, "h", "w"]), 4, 8, group=2))
    batch = net.node("Slice", net.node("Shape", y), *(net.hold(np.array([v])) for v in (0, 1, 0)))
    apart = net.node("Concat", batch, net.hold(np.array([2, 4, 6, 6])), axis=0)
    y = net.node("Transpose", net.node("Reshape", y, apart), perm=[0, 2, 1, 3, 4])
    y = net.node("Reshape", y, net.node("Concat", batch, net.hold(np.array([8, 6, 6])), axis=0))
    net.head(net.conv(y, 8, 8, group=8), 8)


@LAYERS.add("batch norm that cannot be folded: in front of the layer, behind a sum, and used twice")
def norms_that_stay(net: Net) -> None:
    x = net.norm(net.x(2, 3, 8, 8), 3)
    y = net.conv(x, 3, 8)
    both = net.norm(net.node("Add", net.node("Relu", y), net.norm(y, 8)), 8)
    net.head(net.node("PRelu", both, net.weight(8, 1, 1)), 8)


@LAYERS.add("batch norm and scale and shift as Mul and Add, as Paddle leaves them")
def scale_and_shift(net: Net) -> None:
    y = net.node("Mul", net.conv(net.x(2, 3, 8, 8), 3, 8), net.hold(np.float32(1.7)))
    y = net.node("Add", y, net.hold(net.draw(8, 1, 1)))
    net.head(net.conv(net.node("Relu", y), 8, 8), 8)


@LAYERS.add("instance norm, and group norm by hand")
def other_norms(net: Net) -> None:
    y = net.conv(net.x(2, 3, 8, 8), 3, 8)
    y = net.node("Relu", net.node("InstanceNormalization", y, net.weight(8), net.weight(8)))
    y = net.node("Reshape", net.conv(y, 8, 8), net.hold(np.array([0, 2, -1])))
    y = net.node("InstanceNormalization", y, net.hold(np.ones(2, np.float32)), net.hold(np.zeros(2, np.float32)))
    y = net.node("Mul", net.node("Reshape", y, net.hold(np.array([2, 8, 8, 8]))), net.hold(net.draw(8, 1, 1, mean=1.0)))
    net.head(net.node("Mul", y, net.node("Sigmoid", y)), 8)


@LAYERS.add("layer norm by hand and GELU by Erf", opset=11)
def layer_norm_by_hand(net: Net) -> None:
    y = net.dense(net.x(2, 5, 12), 12, 16)
    apart = net.node("Sub", y, net.node("ReduceMean", y, axes=[-1]))
    square = net.node("ReduceMean", net.node("Pow", apart, net.hold(np.float32(2))), axes=[-1])
    y = net.node("Div", apart, net.node("Sqrt", net.node("Add", square, net.hold(np.float32(1e-5)))))
    y = net.dense(net.node("Add", net.node("Mul", y, net.hold(net.draw(16, mean=1.0))), net.weight(16)), 16, 16)
    erf = net.node("Add", net.node("Erf", net.node("Div", y, net.hold(np.float32(2**0.5)))), net.hold(np.float32(1)))
    net.output(net.dense(net.node("Mul", net.node("Mul", y, erf), net.hold(np.float32(0.5))), 16, 6))


@LAYERS.add("a transformer layer: heads apart, softmax, layer norm, sums")
def attention(net: Net) -> None:
    x = net.x(2, 6, 16, declared=["batch", "tokens", 16])
    apart, together = net.hold(np.array([0, 0, 4, 4])), net.hold(np.array([0, 0, 16]))
    q, k, v = (net.node("Reshape", net.node("Add", net.dense(x, 16, 16), net.weight(16)), apart) for _ in range(3))
    q, v = (net.node("Transpose", value, perm=[0, 2, 1, 3]) for value in (q, v))
    scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 2, 3, 1]))
    parts = net.node("Softmax", net.node("Div", scores, net.hold(np.float32(2))), axis=-1)
    mixed = net.node("Reshape", net.node("Transpose", net.node("MatMul", parts, v), perm=[0, 2, 1, 3]), together)
    y = net.node("Add", x, net.dense(mixed, 16, 16))
    y = net.node("LayerNormalization", y, net.hold(net.draw(16, mean=1.0)), net.weight(16), axis=-1)
    net.output(net.node("Add", y, net.dense(net.node("Relu", net.dense(y, 16, 32)), 32, 16)))


# Other domains


@LAYERS.add("com.microsoft: FusedConv")
def fused_conv(net: Net) -> None:
    held = net.weight(8, 3, 3, 3), net.weight(8)
    y = net.node("FusedConv", net.x(2, 3, 8, 8), *held, domain="com.microsoft", activation="Relu", pads=[1] * 4)
    net.head(net.conv(net.probe(y), 8, 8), 8)


@LAYERS.add("com.microsoft: FusedMatMul, Gelu, BiasGelu, SkipLayerNormalization")
def fused_transformer(net: Net) -> None:
    x = net.x(2, 5, 16)
    y = net.node("FusedMatMul", x, net.weight(16, 16), domain="com.microsoft", transB=1, alpha=0.5)
    y = net.node("Gelu", net.probe(y), domain="com.microsoft")
    held = net.hold(net.draw(16, mean=1.0)), net.weight(16), net.weight(16)
    y = net.node("SkipLayerNormalization", net.dense(y, 16, 16), x, *held, domain="com.microsoft")
    y = net.node("BiasGelu", net.dense(y, 16, 24), net.weight(24), domain="com.microsoft")
    net.output(net.dense(y, 24, 6))


@LAYERS.add("a function of the file's own, with a layer inside")
def own_function(net: Net) -> None:
    body = [helper.make_node("MatMul", ["a", "w"], ["b"]), helper.make_node("Relu", ["b"], ["c"])]
    function = helper.make_function("own", "Block", ["a", "w"], ["c"], body, [helper.make_opsetid("", 17)])
    net.functions.append(function)
    y = net.node("Block", net.x(4, 16), net.weight_in(16, 12), domain="own")
    net.output(net.dense(net.probe(y), 12, 6))
