//! Presence, frequency and repetition penalties, as vLLM defines them.

use tidemill_proto::{block::Token, sampling::Sampling, step::History};

/// Applies all penalties: repetition to every token that occurred, presence and frequency to those that were generated.
pub(crate) fn penalize(history: &History, logits: &mut [f32], sampling: &Sampling) {
    for (token, subtracted) in penalized(history, sampling) {
        let Some(logit) = logits.get_mut(token as usize) else { continue };
        *logit = if *logit > 0.0 { *logit / sampling.repetition_penalty } else { *logit * sampling.repetition_penalty };
        *logit -= subtracted;
    }
}

/// The tokens whose logits change, each once, and the amount that presence and frequency subtract after repetition.
pub(crate) fn penalized(history: &History, sampling: &Sampling) -> impl Iterator<Item = (Token, f32)> {
    let &Sampling { repetition_penalty, frequency_penalty, presence_penalty, .. } = sampling;
    history.tokens().filter_map(move |(token, generated)| match generated {
        0 => (repetition_penalty != 1.0).then_some((token, 0.0)),
        _ => Some((token, frequency_penalty * generated as f32 + presence_penalty)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_penalty_falls_on_its_tokens() {
        let mut history = History::new(&[0, 1, 1]);
        for token in [1, 2, 2, 2, 900] {
            history.push(token);
        }
        let penalized = |sampling: Sampling| {
            let mut logits = [4.0, -4.0, 8.0, 1.0];
            penalize(&history, &mut logits, &sampling);
            logits
        };
        let neutral = Sampling::default();
        assert_eq!(penalized(Sampling { repetition_penalty: 2.0, ..neutral.clone() }), [2.0, -8.0, 4.0, 1.0]);
        assert_eq!(penalized(Sampling { presence_penalty: 0.5, ..neutral.clone() }), [4.0, -4.5, 7.5, 1.0]);
        assert_eq!(penalized(Sampling { frequency_penalty: 0.5, ..neutral }), [4.0, -4.5, 6.5, 1.0]);
    }
}
