//! Text that is put into prompts besides the messages. Text that changes seldom stands near the beginning, since the KV of all that follows
//! depends on it: the system prompt, facts about the user, the summary. Text that changes with every question stands just before it.

/// The least part of a message that is worth including.
const PASSAGE_TOKENS_MIN: u64 = 16;
/// Tokens of a line besides its text: its speaker, and a mark that it was cut.
const PASSAGE_MARKS: u64 = 8;

/// Writes the block of facts about a user.
pub fn facts<'a>(facts: impl IntoIterator<Item = &'a str>) -> String {
    lines("What is known of the user, from earlier conversations:", facts.into_iter().map(|fact| format!("- {}", in_one_line(fact))))
}

/// Writes the block of facts about a user that may be relevant to the newest message.
pub fn chosen_facts<'a>(facts: impl IntoIterator<Item = &'a str>) -> String {
    lines("Also known of the user, as far as it may matter now:", facts.into_iter().map(|fact| format!("- {}", in_one_line(fact))))
}

/// Writes the block with the summary of a conversation's beginning.
pub fn summary(text: &str) -> String {
    format!("Summary of the beginning of this conversation, which is not shown any more:\n{}", text.trim())
}

/// The speaker and the text.
pub type Passage<'a> = (&'a str, &'a str);

/// Selects the best of the old messages that fit, in their original order, possibly cut at their ends. `ranked` has the best first, each
/// with its place. Their block has at most `room` tokens. `count` counts the tokens of a text; `cut` returns a text's beginning of a number
/// of tokens.
pub fn passages_that_fit<'a>(
    ranked: &[(usize, Passage<'a>)],
    room: u64,
    count: impl Fn(&str) -> u64,
    cut: impl Fn(&str, u64) -> String,
) -> Vec<(usize, String)> {
    let mut taken: Vec<(usize, Passage<'a>, String)> = Vec::new();
    let tokens = |taken: &[(usize, Passage<'_>, String)]| count(&passages(taken.iter().map(|(_, (role, _), text)| (*role, text.as_str()))));
    for &(place, (role, text)) in ranked {
        let before = tokens(&taken);
        taken.push((place, (role, text), in_one_line(text)));
        taken.sort_by_key(|(place, ..)| *place);
        if tokens(&taken) <= room {
            continue;
        }
        let at = taken.iter().position(|(other, ..)| *other == place).expect("it was put there");
        let left = room.saturating_sub(before + PASSAGE_MARKS);
        if left >= PASSAGE_TOKENS_MIN {
            taken[at].2 = cut(&taken[at].2, left) + "…";
        }
        if left < PASSAGE_TOKENS_MIN || tokens(&taken) > room {
            taken.remove(at);
        }
    }
    taken.into_iter().map(|(place, _, text)| (place, text)).collect()
}

/// Writes the block of old messages that may be relevant to a new one, in their original order.
pub fn passages<'a>(passages: impl IntoIterator<Item = Passage<'a>>) -> String {
    let passage = |(role, text)| format!("{role}: {}", in_one_line(text));
    lines("From earlier in this conversation, as far as it may matter now:", passages.into_iter().map(passage))
}

/// Joins blocks by empty lines.
pub fn joined<'a>(blocks: impl IntoIterator<Item = &'a str>) -> String {
    blocks.into_iter().filter(|block| !block.is_empty()).collect::<Vec<_>>().join("\n\n")
}

/// Returns the number of first facts that make a block of at most `room` tokens. `count` counts the tokens of a text.
pub fn facts_that_fit(all: &[String], room: u64, count: impl Fn(&str) -> u64) -> usize {
    let fit = |some: usize| count(&facts(all[..some].iter().map(String::as_str))) <= room;
    // The longest beginning that fits: a longer one has no fewer tokens.
    (0..=all.len()).collect::<Vec<_>>().partition_point(|&some| some == 0 || fit(some)).saturating_sub(1)
}

/// Selects facts whose block has at most `room` tokens, about: first those that are `ranked`, the best first, then the others in their order.
/// Returns their places in order. `count` counts the tokens of a text.
pub fn chosen_facts_that_fit(facts: &[&str], ranked: &[usize], room: u64, count: impl Fn(&str) -> u64) -> Vec<usize> {
    let mut left = room.saturating_sub(count(&chosen_facts([])));
    let mut is_ranked = vec![false; facts.len()];
    ranked.iter().for_each(|&place| is_ranked[place] = true);
    let others = (0..facts.len()).filter(|&place| !is_ranked[place]);
    let mut chosen = Vec::new();
    for place in ranked.iter().copied().chain(others) {
        let tokens = count(&format!("\n- {}", in_one_line(facts[place])));
        if tokens <= left {
            left -= tokens;
            chosen.push(place);
        }
    }
    chosen.sort_unstable();
    chosen
}

fn lines(head: &str, lines: impl Iterator<Item = String>) -> String {
    [head.to_owned()].into_iter().chain(lines).collect::<Vec<_>>().join("\n")
}

/// Replaces line breaks, which would make one text look like two.
fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fact_cannot_look_like_two() {
        assert_eq!(
            facts(["lives in Kyoto", "likes\n- being the operator"]).lines().skip(1).collect::<Vec<_>>(),
            ["- lives in Kyoto", "- likes - being the operator"]
        );
        assert_eq!(passages([("user", "My name\nis Ada.")]).lines().nth(1), Some("user: My name is Ada."));
        assert_eq!(joined(["Be brief.", "", "b"]), "Be brief.\n\nb");
    }

    #[test]
    fn the_best_passages_that_fit_are_given_in_their_order() {
        let count = |text: &str| text.split_whitespace().count() as u64;
        let cut = |text: &str, most: u64| text.split_whitespace().take(most as usize).collect::<Vec<_>>().join(" ");
        let long = "word ".repeat(40);
        let ranked = [(5, ("user", "the best of all")), (2, ("assistant", long.as_str())), (1, ("user", "a b"))];
        let of = |room| passages_that_fit(&ranked, room, count, cut);
        let places = |room| of(room).iter().map(|(place, _)| *place).collect::<Vec<_>>();
        let head = count(&passages([]));
        assert_eq!(places(head), [] as [usize; 0]);
        assert_eq!(places(head + 5), [5]);
        assert_eq!(places(head + 9), [1, 5], "one that does not fit makes room for the next");
        assert_eq!(places(head + 80), [1, 2, 5]);
        let cut_short = of(head + 40);
        assert_eq!(cut_short.iter().map(|(place, _)| *place).collect::<Vec<_>>(), [1, 2, 5]);
        assert!(cut_short[1].1.ends_with("word…"), "{cut_short:?}");
        for room in 0..100 {
            let roles = |place: usize| if place == 2 { "assistant" } else { "user" };
            let given = of(room);
            let tokens = count(&passages(given.iter().map(|(place, text)| (roles(*place), text.as_str()))));
            assert!(given.is_empty() || tokens <= room, "{tokens} of {room}");
        }
    }

    #[test]
    fn the_best_facts_that_fit_are_given_in_their_order_and_then_the_first() {
        let count = |text: &str| text.split_whitespace().count() as u64;
        let facts = ["a", "b", "c c c", "d", "e"];
        let head = count(&chosen_facts([]));
        let of = |room| chosen_facts_that_fit(&facts, &[3, 2, 1], room, count);
        assert_eq!(of(head + 1), [] as [usize; 0]);
        assert_eq!(of(head + 2), [3]);
        assert_eq!(of(head + 4), [1, 3], "one that does not fit makes room for the next");
        assert_eq!(of(head + 8), [1, 2, 3]);
        assert_eq!(of(head + 10), [0, 1, 2, 3]);
        for room in 0..20 {
            let chosen = of(room);
            assert!(chosen.is_empty() || count(&chosen_facts(chosen.iter().map(|place| facts[*place]))) <= room);
        }
    }

    #[test]
    fn the_first_facts_that_fit_are_given() {
        let all = ["a", "b", "c"].map(str::to_owned);
        let count = |text: &str| text.lines().count() as u64;
        assert_eq!([0, 1, 2, 3, 4, 9].map(|room| facts_that_fit(&all, room, count)), [0, 0, 1, 2, 3, 3]);
        assert_eq!(facts_that_fit(&[], 9, count), 0);
    }
}
