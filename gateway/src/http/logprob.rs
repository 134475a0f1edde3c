//! Log-probabilities as JSON numbers.

/// The stand-in for minus infinity in JSON, as in vLLM.
const LOGPROB_MIN: f32 = -9999.0;

/// Makes a log-probability finite, since JSON has no infinity.
pub(crate) fn json_logprob(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(LOGPROB_MIN) } else { LOGPROB_MIN }
}
