//! Every family of models in clusters of real processes: prefill by one worker and decode by another, cold and from the pool, give the
//! tokens of one worker alone.

use crate::support::{Answer, Case, Cluster, mixed_cases};
use serde_json::json;

macro_rules! families {
    ($($test:ident = $families:expr,)+) => {
        mod each_family_has_the_same_tokens_disaggregated_and_cached {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $test() {
                    super::same_tokens_disaggregated_and_cached(&$families).await;
                }
            )+
        }
    };
}

// One fixture of each family, a few for each cluster; GPT-OSS also in its published format.
families! {
    mistral_and_qwen = ["mistral", "qwen2", "qwen3"],
    gemma_and_phi = ["gemma2", "gemma3", "phi3"],
    olmo_and_granite = ["olmo2", "olmo3", "granite"],
    smollm3_glm4_and_cohere2 = ["smollm3", "glm4", "cohere2"],
    starcoder2_exaone4_and_seed_oss = ["starcoder2", "exaone4", "seed-oss"],
    ministral3_mixtral_and_qwen3_moe = ["ministral3", "mixtral", "qwen3-moe"],
    qwen2_moe_glm4_moe_and_minimax_m2 = ["qwen2-moe", "glm4-moe", "minimax-m2"],
    deepseek = ["deepseek-v2", "deepseek-v3"],
    gpt_oss = ["gpt-oss", "gpt-oss-mxfp4"],
    recurrent = ["lfm2", "qwen3-next", "qwen3-5", "qwen3-5-moe"],
}

/// Prompts of several blocks, longer than any fixture's window.
fn cases() -> Vec<Case> {
    let cases = mixed_cases(7).into_iter().filter(|case| case.prompt.len() > 60).take(2);
    cases.map(|case| Case { prompt: case.prompt.iter().map(|token| token % 250).collect(), ..case }).collect()
}

async fn answer(cluster: &Cluster, model: &str, case: &Case) -> Answer {
    let mut body = case.body();
    body["model"] = json!(model);
    let (status, answer) = cluster.post("/completions", &body).await;
    assert_eq!(status, 200, "{model}: {answer}");
    let tokens = answer["choices"][0]["token_ids"].as_array().expect("ids").iter();
    Answer { tokens: tokens.map(|id| id.as_u64().expect("an id") as u32).collect(), usage: answer["usage"].clone() }
}

async fn same_tokens_disaggregated_and_cached(families: &[&str]) {
    let cases = cases();
    assert!(!cases.is_empty());
    let dirs: Vec<_> = families.iter().map(|name| format!("{}/../model/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))).collect();
    let models: Vec<(&str, &str)> = families.iter().copied().zip(dirs.iter().map(String::as_str)).collect();
    let alone = Cluster::start_with(&models, &["--prefill", "0", "--kvpool", "0"]);
    let cluster = Cluster::start_with(&models, &["--local-tail-tokens", "0", "--threads", "1"]);
    for family in families {
        for case in &cases {
            let expected = answer(&alone, family, case).await;
            let cold = answer(&cluster, family, case).await;
            assert_eq!(cold.tokens, expected.tokens, "{family}, cold");
            assert!(cold.usage["tidemill"]["prefill_worker"].is_string(), "{family}: {}", cold.usage);
            let again = answer(&cluster, family, case).await;
            assert_eq!(again.tokens, expected.tokens, "{family}, cached");
            assert!(again.cached() > 0, "{family}: {}", again.usage);
        }
    }
    alone.stop();
    cluster.stop();
}
