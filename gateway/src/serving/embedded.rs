//! Embeddings, collected from workers' events, and their normalization.

use crate::{requests::error::ApiError, serving::backend::Submission};
use tidemill_cluster::{Outcome, RequestEvent};

/// Collects one embedding per input.
pub async fn collect(mut submission: Submission, inputs: usize) -> Result<Vec<Vec<f32>>, ApiError> {
    let mut embeddings = vec![None; inputs];
    let mut open = inputs;
    while open > 0 {
        match submission.next().await {
            Some((input, RequestEvent::Embedding(values))) => embeddings[input] = Some(values),
            Some((_, RequestEvent::Finished { outcome: Outcome::Failed(failure), .. })) => return Err(failure.into()),
            Some((_, RequestEvent::Finished { .. })) => open -= 1,
            Some(_) => {}
            None => return Err(ApiError::internal("the embeddings were produced faster than they were read, and were cut")),
        }
    }
    embeddings
        .into_iter()
        .collect::<Option<_>>()
        .ok_or_else(|| ApiError::internal("a worker gave no embedding: please report this as a bug"))
}

/// Normalizes a row to length 1, like OpenAI's: then a dot product is the cosine.
pub fn unit(mut values: Vec<f32>) -> Vec<f32> {
    let norm = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if norm > 0.0 {
        values.iter_mut().for_each(|value| *value = (f64::from(*value) / norm) as f32);
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embeddings_have_length_1() {
        assert_eq!(unit(vec![3.0, 4.0]), [0.6, 0.8]);
        assert_eq!(unit(vec![0.0, 0.0]), [0.0, 0.0]);
    }
}
