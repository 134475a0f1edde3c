//! The credential for a coordinator's operators' port, where operators sign in.

use anyhow::{Context, ensure};
use reqwest::{
    ClientBuilder,
    header::{AUTHORIZATION, HeaderMap, HeaderValue},
};
use std::path::{Path, PathBuf};
use tidemill_tenancy::web::read_token;

#[derive(Clone, Debug, Default, clap::Args)]
pub struct TokenArgs {
    /// File with a token of the operators' identity provider, where the coordinators have a section `[operators]`
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
}

impl TokenArgs {
    /// Begins a client that sends the token with each request, if there is one.
    pub fn client(&self) -> anyhow::Result<ClientBuilder> {
        let token = self.token_file.as_deref().map(read).transpose()?;
        client(token.as_deref())
    }
}

/// Begins a client that sends this token with each request. No proxy: a cluster's addresses are private.
pub fn client(token: Option<&str>) -> anyhow::Result<ClientBuilder> {
    let builder = reqwest::Client::builder().no_proxy();
    let Some(token) = token else { return Ok(builder) };
    let mut value = HeaderValue::from_str(&format!("Bearer {token}")).context("the token is not one line of ASCII characters")?;
    // Hides the token when a request is formatted.
    value.set_sensitive(true);
    Ok(builder.default_headers(HeaderMap::from_iter([(AUTHORIZATION, value)])))
}

/// The secret by which `tidemill up` may look at its coordinators, if their file says that operators sign in.
pub fn look_token(config: Option<&Path>) -> anyhow::Result<Option<String>> {
    let Some(config) = config else { return Ok(None) };
    let text = std::fs::read_to_string(config).with_context(|| format!("cannot read {}", config.display()))?;
    let table: toml::Table = text.parse().with_context(|| format!("{} is not TOML", config.display()))?;
    let Some(operators) = table.get("operators") else { return Ok(None) };
    let file = operators.get("look_token").and_then(toml::Value::as_str);
    let file =
        file.context("operators sign in ([operators]), and `tidemill up` has to look at its coordinators: name operators.look_token")?;
    read(Path::new(file)).map(Some)
}

fn read(path: &Path) -> anyhow::Result<String> {
    let token = read_token(path).with_context(|| format!("cannot read the token in {}", path.display()))?;
    ensure!(!token.is_empty(), "{} is empty: it must have a token", path.display());
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_whose_operators_sign_in_is_looked_at_with_a_secret() {
        let dir = tempfile::tempdir().unwrap();
        let (config, secret) = (dir.path().join("c.toml"), dir.path().join("secret"));
        std::fs::write(&secret, " s3cret\n").unwrap();
        let looked = |text: &str| {
            std::fs::write(&config, text).unwrap();
            look_token(Some(&config)).map_err(|error| error.to_string())
        };
        assert_eq!(looked("queue_max = 5"), Ok(None));
        assert!(looked("[operators]\nissuer = 'x'").unwrap_err().contains("operators.look_token"));
        assert_eq!(looked(&format!("[operators]\nlook_token = '{}'", secret.display())), Ok(Some("s3cret".into())));
        std::fs::write(&secret, "\n").unwrap();
        assert!(looked(&format!("[operators]\nlook_token = '{}'", secret.display())).unwrap_err().contains("is empty"));
        assert_eq!(look_token(None).unwrap(), None);
    }
}
