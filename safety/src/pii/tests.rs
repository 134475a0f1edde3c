use super::{
    Kind,
    find::Finder,
    redact::{Stream, masked},
    vault::{Restorer, Vault},
};
use proptest::prelude::*;
use std::sync::Arc;

fn finder() -> Finder {
    Finder::new(&Kind::ALL).with_names("Jane Doe\nDoe # a remark\n\nJosé da Silva").unwrap()
}

#[test]
fn what_is_somebodys_is_found() {
    let rows = [
        ("write to jane.doe+x@mail.example.org.", "write to [EMAIL]."),
        ("<a_b@ex-ample.co.uk>, or mailto:c@d.io", "<[EMAIL]>, or mailto:[EMAIL]"),
        ("call +49 30 901820 or (415) 555-2671!", "call [PHONE] or [PHONE]!"),
        ("1-800-555-0199, 415.555.2671, +1 (415) 555-2671", "[PHONE], [PHONE], [PHONE]"),
        ("0049 30 901820; 030 901820-15; 020 7946 0958; 0171/1234567", "[PHONE]; [PHONE]; [PHONE]; [PHONE]"),
        ("+14155552671", "[PHONE]"),
        ("4111 1111 1111 1111, 5500-0000-0000-0004, 378282246310005", "[CARD], [CARD], [CARD]"),
        ("4111 1111 1111 1111 12/27, CVC 123", "[CARD] 12/27, CVC 123"),
        ("card 3782 822463 10005 ok", "card [CARD] ok"),
        ("DE89 3704 0044 0532 0130 00 and GB82WEST12345698765432.", "[IBAN] and [IBAN]."),
        ("SSN 123-45-6789", "SSN [SSN]"),
        ("from 93.184.216.34:8080? no: from 93.184.216.34.", "from [IP]? no: from [IP]."),
        ("at 2001:db8:0:1::8a2e, fe80::1 and ::ffff:10.0.0.7", "at [IP], [IP] and [IP]"),
        ("Jane Doe's friend JOSÉ DA SILVA. And doe.", "[NAME]'s friend [NAME]. And [NAME]."),
    ];
    for (text, expected) in rows {
        assert_eq!(masked(&finder(), text), expected);
    }
}

#[test]
fn look_alikes_are_left_alone() {
    let texts = [
        // Orders, invoices, identifiers
        "order #4111111111111111",
        "ORD-4111-1111-1111-1111",
        "invoice 2024-000123456",
        "SKU 123-456-7890-12",
        "id=4155552671",
        "tracking 9400110200881234567890",
        "ISBN 978-3-16-148410-0",
        "4111 1111 1111 1112",
        "4111-1111 1111-1111",
        "1234 5678 9012 3456",
        "550e8400-e29b-41d4-a716-446655440000",
        "12345678-1234-1234-1234-123456789012",
        // Hashes
        "d41d8cd98f00b204e9800998ecf8427e",
        "commit 4111111111111111aa",
        "sha 123456789012345678901234567890",
        // Versions
        "version 1.2.3.4",
        "v10.0.0.1",
        "release: 7.8.9.10",
        "1.2.3",
        "1.2.3.4.5",
        "10.0.19041.388",
        "Firmware 2.3.4.5",
        "kernel 6.1.0-17",
        // Dates and times
        "2024-01-15",
        "15.01.2024",
        "01-02-2024",
        "01/02/2024 12:30:45",
        "2024-01-15T10:30:00Z",
        "10:30:45",
        "1704067200",
        // Numbers
        "1,234,567.89",
        "$1234567890",
        "3.14159265358979",
        "100-200-300",
        "0123456789",
        "555-1234",
        "000-12-3456",
        "666-12-3456",
        "900-12-3456",
        "123-00-4567",
        "123-45-0000",
        "123456789",
        "49 30 901820",
        // Code
        "std::vector",
        "a::b",
        "de:ad:be:ef:00:01",
        "127.0.0.1",
        "0.0.0.0",
        "::1",
        "255.255.255.255",
        "::",
        "face::cafe",
        "icon@2x.png",
        "git@example.org:owner/name",
        "user@localhost",
        "@mention",
        "npm i @scope/pkg@1.2.3",
        "a@b",
        "x@.com",
        "DE00 3704 0044 0532 0130 00",
        "GB82TEST12345698765432",
        "DE8937040044",
        "Doesburg",
        "does",
        "Jane Doherty",
        "undoe",
    ];
    for text in texts {
        assert_eq!(masked(&finder(), text), text);
        let said = format!("It says {text}, I think.");
        assert_eq!(masked(&finder(), &said), said);
    }
}

#[test]
fn only_what_is_asked_for_is_found() {
    let only = Finder::new(&[Kind::Email]);
    assert_eq!(masked(&only, "a@b.org, 123-45-6789"), "[EMAIL], 123-45-6789");
}

#[test]
fn a_list_of_names_says_which_line_is_wrong() {
    for (list, words) in [("Al", "line 1"), ("Ann Lee\nR2 D2", "line 2"), ("x\"y", "line 1")] {
        let error = Finder::new(&[]).with_names(list).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn of_a_stream_only_what_may_become_a_finding_waits() {
    let mut stream = Stream::new(Arc::new(finder()));
    let pieces = ["Hello my", " friend, call +49", " 30", " 90", "1820", " now, or", " write to jane", "@exam", "ple.org", ". Bye"];
    let out: Vec<String> = pieces.iter().map(|piece| stream.push(piece)).collect();
    assert_eq!(out.concat() + &stream.finish(), "Hello my friend, call [PHONE] now, or write to [EMAIL]. Bye");
    assert!(out[1].ends_with("call ") || out[1].ends_with("friend, "), "{out:?}");
    assert_eq!((out[2].as_str(), out[3].as_str(), stream.take_found(), stream.held_bytes()), ("", "", vec![Kind::Phone, Kind::Email], 0));
}

#[test]
fn placeholders_are_stable_and_go_back() {
    let (finder, mut vault) = (finder(), Vault::default());
    let texts = ["I am a@b.org, not c@d.org; [EMAIL_1] is a word", "a@b.org again, +14155552671"];
    texts.iter().for_each(|text| vault.see(text));
    let hidden = texts.map(|text| vault.redact(&finder, text));
    assert_eq!(hidden, ["I am [EMAIL_2], not [EMAIL_3]; [EMAIL_1] is a word", "[EMAIL_2] again, [PHONE_1]"]);
    assert_eq!(hidden.each_ref().map(|text| vault.restored(text)), texts.map(str::to_owned));
    assert_eq!(vault.counts().collect::<Vec<_>>(), [(Kind::Email, 2), (Kind::Phone, 1)]);

    let mut restorer = Restorer::default();
    let mut push = |piece: &str| restorer.push(&vault, piece);
    assert_eq!(
        ["Ask [", "EMA", "IL_", "2", "] or [1] or [EMAILS]", " [PHO"].map(&mut push),
        ["Ask ", "", "", "", "a@b.org or [1] or [EMAILS]", " "]
    );
    assert_eq!(restorer.finish(&vault), "[PHO", "it never became one");
}

/// Pieces of text that do and do not make findings.
fn texts() -> impl Strategy<Value = String> {
    let list = [
        "a@b.org",
        "jane",
        "Jane Doe",
        " ",
        " ",
        "4111 1111 1111 1111",
        "+49 30 901820",
        "v",
        "version ",
        "1.2.3.4",
        "[",
        "EMAIL_1]",
        ".",
        "é",
        "日本 ",
        "DE89 3704 0044 0532 0130 00",
        "123-45-6789",
        "fe80::1",
        "#",
        "-",
        "12",
        "@",
        "(415) 555-2671",
        ", ",
        "\n",
        "word ",
    ];
    prop::collection::vec(0..list.len(), 0..14).prop_map(move |words| words.into_iter().map(|word| list[word]).collect())
}

proptest! {
    /// The pieces of a text do not affect the result.
    #[test]
    fn pieces_do_not_matter(text in texts(), cuts in prop::collection::vec(1_usize..9, 1..40)) {
        let finder = Arc::new(finder());
        let characters: Vec<char> = text.chars().collect();
        let mut vault = Vault::default();
        vault.see(&text);
        let hidden = vault.redact(&finder, &text);
        prop_assert_eq!(vault.restored(&hidden), text.clone());
        let (mut stream, mut restorer) = (Stream::new(Arc::clone(&finder)), Restorer::default());
        let (mut out, mut back) = (String::new(), String::new());
        let mut sizes = cuts.iter().cycle();
        let mut rest = &characters[..];
        while !rest.is_empty() {
            let (piece, after) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            out += &stream.push(&piece.iter().collect::<String>());
            rest = after;
        }
        out += &stream.finish();
        prop_assert_eq!(&out, &masked(&finder, &text), "{:?}", text);
        let mut rest: &[char] = &hidden.chars().collect::<Vec<_>>();
        while !rest.is_empty() {
            let (piece, after) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            back += &restorer.push(&vault, &piece.iter().collect::<String>());
            rest = after;
        }
        back += &restorer.finish(&vault);
        prop_assert_eq!(back, text);
    }

    /// Any text, cut after each character.
    #[test]
    fn any_text_is_read(text in "\\PC{0,120}") {
        let finder = Arc::new(finder());
        let mut stream = Stream::new(Arc::clone(&finder));
        let out: String = text.chars().map(|c| stream.push(c.encode_utf8(&mut [0; 4]))).collect();
        prop_assert_eq!(out + &stream.finish(), masked(&finder, &text));
    }
}
