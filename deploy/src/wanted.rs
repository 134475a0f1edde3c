//! The numbers of workers that coordinators want, as `/cluster` shows them.

use anyhow::{Context, bail};
use serde::Deserialize;
use std::{collections::BTreeMap, time::Duration};
use tokio::sync::watch;

/// The wanted numbers of workers, by model and role.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted(BTreeMap<Fleet, usize>);

/// The workers of one role and model.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fleet {
    pub model: String,
    pub role: &'static str,
}

impl Wanted {
    /// The wanted number, or `None` if the coordinators want none, or do not know one yet.
    pub fn of(&self, model: &str, role: &'static str) -> Option<usize> {
        self.0.get(&Fleet { model: model.to_owned(), role }).copied()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Fleet, usize)> {
        self.0.iter().map(|(fleet, workers)| (fleet, *workers))
    }

    /// Asks the coordinators at all of these addresses of `/cluster`. Each sees its own requests, so the largest number counts; one that
    /// does not answer is skipped, unless none does.
    pub async fn ask(client: &reqwest::Client, urls: &[String]) -> anyhow::Result<Self> {
        let mut wanted = BTreeMap::new();
        let (mut has_answer, mut failure) = (false, None);
        for url in urls {
            match ask(client, url).await {
                Ok(answer) => {
                    has_answer = true;
                    answer.models.into_iter().for_each(|model| model.count(&mut wanted));
                }
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if !has_answer => Err(error),
            _ => Ok(Self(wanted)),
        }
    }
}

/// A client with a short timeout.
pub fn client(builder: reqwest::ClientBuilder) -> reqwest::Result<reqwest::Client> {
    builder.timeout(ANSWER_MAX).build()
}

/// Polls the wanted numbers in a separate task, so that a coordinator that does not answer delays nothing else. `say` is called with each
/// new problem.
pub fn watch(client: reqwest::Client, urls: Vec<String>, every: Duration, say: fn(&str)) -> watch::Receiver<Wanted> {
    let (told, wanted) = watch::channel(Wanted::default());
    tokio::spawn(async move {
        let mut problem = None;
        while !told.is_closed() {
            match Wanted::ask(&client, &urls).await {
                Ok(wanted) => {
                    problem = None;
                    told.send_replace(wanted);
                }
                Err(error) => {
                    let error = format!("cannot learn how many workers are wanted: {error:#}");
                    if problem.as_ref() != Some(&error) {
                        say(&error);
                        problem = Some(error);
                    }
                }
            }
            tokio::time::sleep(every).await;
        }
    });
    wanted
}

/// The time that a coordinator has to answer.
const ANSWER_MAX: Duration = Duration::from_secs(5);

#[derive(Deserialize)]
struct Answer {
    models: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    name: String,
    #[serde(default)]
    wanted: Option<OfModel>,
}

#[derive(Deserialize)]
struct OfModel {
    prefill: usize,
    decode: usize,
}

impl Model {
    fn count(self, wanted: &mut BTreeMap<Fleet, usize>) {
        let Some(of_model) = self.wanted else { return };
        for (role, workers) in [("prefill", of_model.prefill), ("decode", of_model.decode)] {
            let most = wanted.entry(Fleet { model: self.name.clone(), role }).or_insert(0);
            *most = workers.max(*most);
        }
    }
}

async fn ask(client: &reqwest::Client, url: &str) -> anyhow::Result<Answer> {
    let answer = client.get(url).send().await.with_context(|| format!("cannot ask {url}"))?;
    if !answer.status().is_success() {
        bail!(
            "{url} answers {}: with --admin ADDR, or with keys, a coordinator shows its cluster to operators at that address only",
            answer.status()
        );
    }
    answer.json().await.with_context(|| format!("{url} is not what a coordinator shows"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use axum::{Router, routing::get};
    use serde_json::{Value, json};

    /// Starts a coordinator that shows the channel's value. Returns the address of its `/cluster`.
    pub(crate) async fn coordinator(shown: watch::Receiver<Value>) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/cluster", listener.local_addr().unwrap());
        let router = Router::new().route("/cluster", get(move || async move { axum::Json(shown.borrow().clone()) }));
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    }

    pub(crate) fn shown(prefill: usize, decode: usize) -> Value {
        json!({"models": [{"name": "m", "wanted": {"prefill": prefill, "decode": decode}}, {"name": "fixed"}], "members": []})
    }

    #[tokio::test]
    async fn the_largest_number_counts_and_one_that_is_away_is_passed_over() {
        let (a, b) = (watch::channel(shown(1, 4)), watch::channel(shown(2, 3)));
        let urls = [coordinator(a.1).await, "http://127.0.0.1:1/cluster".into(), coordinator(b.1).await];
        let client = client(reqwest::Client::builder()).unwrap();
        let wanted = Wanted::ask(&client, &urls).await.unwrap();
        assert_eq!(["prefill", "decode"].map(|role| wanted.of("m", role)), [Some(2), Some(4)]);
        assert_eq!(wanted.of("fixed", "decode"), None);
        let error = Wanted::ask(&client, &urls[1..2]).await.unwrap_err();
        assert!(error.to_string().contains("cannot ask http://127.0.0.1:1/cluster"), "{error}");
    }
}
