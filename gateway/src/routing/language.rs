//! The language of a text, by its letters and their triples (`whatlang`). Short texts are not judged.

use whatlang::{Lang, detect};

/// The least length of a text that is judged.
const BYTES_MIN: usize = 20;
/// The length that is examined.
const BYTES_MAX: usize = 2048;

/// The ISO 639-3 code of the text's language, if it is clear.
pub fn of(text: &str) -> Option<&'static str> {
    let text = &text[..text.floor_char_boundary(BYTES_MAX)];
    if text.len() < BYTES_MIN {
        return None;
    }
    detect(text).filter(whatlang::Info::is_reliable).map(|info| info.lang().code())
}

/// A language's ISO 639-3 code, such as `deu`, from that code or from its ISO 639-1 code, such as `de`.
pub fn code(name: &str) -> Option<&'static str> {
    let name = TWO_LETTERS.iter().find(|(two, _)| *two == name).map_or(name, |(_, three)| three);
    Lang::from_code(name).map(|lang| lang.code())
}

/// Two-letter codes of the languages with the most readers.
const TWO_LETTERS: [(&str, &str); 40] = [
    ("ar", "ara"),
    ("bg", "bul"),
    ("bn", "ben"),
    ("ca", "cat"),
    ("cs", "ces"),
    ("da", "dan"),
    ("de", "deu"),
    ("el", "ell"),
    ("en", "eng"),
    ("es", "spa"),
    ("et", "est"),
    ("fa", "pes"),
    ("fi", "fin"),
    ("fr", "fra"),
    ("he", "heb"),
    ("hi", "hin"),
    ("hr", "hrv"),
    ("hu", "hun"),
    ("id", "ind"),
    ("it", "ita"),
    ("ja", "jpn"),
    ("ko", "kor"),
    ("lt", "lit"),
    ("lv", "lav"),
    ("nl", "nld"),
    ("no", "nob"),
    ("pl", "pol"),
    ("pt", "por"),
    ("ro", "ron"),
    ("ru", "rus"),
    ("sk", "slk"),
    ("sl", "slv"),
    ("sr", "srp"),
    ("sv", "swe"),
    ("ta", "tam"),
    ("th", "tha"),
    ("tr", "tur"),
    ("uk", "ukr"),
    ("vi", "vie"),
    ("zh", "cmn"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_are_told_apart_and_short_texts_are_not_judged() {
        for (text, language) in [
            ("Could you please tell me how to get to the station from here, and how long it will take?", Some("eng")),
            ("Könnten Sie mir bitte sagen, wie ich von hier zum Bahnhof komme und wie lange das dauert?", Some("deu")),
            ("Pourriez-vous me dire comment aller à la gare et combien de temps cela prend, s'il vous plaît ?", Some("fra")),
            ("请告诉我怎么去火车站，需要多长时间？谢谢你的帮助。", Some("cmn")),
            ("駅への行き方を教えてください。どのくらい時間がかかりますか。", Some("jpn")),
            ("ok", None),
            ("", None),
        ] {
            assert_eq!(of(text), language, "{text}");
        }
        assert_eq!(of(&"ж".repeat(5000)).map(str::len), of(&"ж".repeat(1024)).map(str::len), "a cut is between characters");
    }

    #[test]
    fn both_kinds_of_codes_name_a_language() {
        assert!(TWO_LETTERS.iter().all(|(two, three)| code(two) == Some(*three)), "whatlang knows them all");
        assert_eq!((code("deu"), code("xx"), code("")), (Some("deu"), None, None));
    }
}
