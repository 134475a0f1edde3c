//! `tidemill cluster`: the current state of a cluster in the terminal: models, members, tiers and decisions, refreshed every second.

mod screen;
mod table;

use crate::operators::TokenArgs;
use anyhow::{Context, bail};
use nix::libc;
use screen::Screen;
use std::{
    io::{self, ErrorKind, IsTerminal, Write},
    time::Duration,
};

/// Watch a running cluster.
#[derive(Clone, Debug, clap::Args)]
pub struct ClusterArgs {
    /// URL of a coordinator, or of its operators' port
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Print it once, and end
    #[arg(long)]
    pub once: bool,
    /// Seconds between two refreshes
    #[arg(long, default_value_t = 1.0)]
    pub every_s: f64,
    #[command(flatten)]
    token: TokenArgs,
}

const ANSWER: Duration = Duration::from_secs(5);

/// Runs until Ctrl-C or until stdout is closed. A cluster that does not answer is asked again.
pub async fn cluster(args: ClusterArgs) -> anyhow::Result<()> {
    let base = args.url.trim_end_matches('/').trim_end_matches("/v1");
    if !base.starts_with("http://") || reqwest::Url::parse(base).is_err() {
        bail!("`{base}` is not an http:// URL such as http://127.0.0.1:8000");
    }
    if !(0.1..=3600.0).contains(&args.every_s) {
        bail!("--every-s must be from 0.1 to 3600");
    }
    let client = args.token.client()?.timeout(ANSWER).build()?;
    let url = format!("{base}/cluster");
    if args.once {
        show(&look(&client, &url).await?, false)?;
        return Ok(());
    }
    let refreshes = io::stdout().is_terminal();
    loop {
        let frame = look(&client, &url).await.unwrap_or_else(|error| format!("{error:#}; asking again\n"));
        if !show(&frame, refreshes)? {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_secs_f64(args.every_s)).await;
    }
}

async fn look(client: &reqwest::Client, url: &str) -> anyhow::Result<String> {
    let response = client.get(url).send().await.with_context(|| format!("no answer from {url}: is a cluster running there?"))?;
    let status = response.status();
    if !status.is_success() {
        bail!("{url} answered {status}: with --admin, a coordinator shows its cluster at that address only");
    }
    let screen: Screen = response.json().await.with_context(|| format!("{url} is not what a coordinator shows"))?;
    Ok(screen.to_string())
}

/// Prints a frame, in place of the last one on a terminal. Returns `false` if stdout is closed.
fn show(frame: &str, refreshes: bool) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    let text = if refreshes { in_place(frame, rows()) } else { format!("{frame}\n") };
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        written => written.map(|()| true),
    }
}

/// A frame of at most `rows` lines that overwrites the last one: the cursor goes home, and the rest of each line and of the screen is
/// cleared. Nothing flickers.
fn in_place(frame: &str, rows: usize) -> String {
    let lines: Vec<&str> = frame.lines().collect();
    let mut shown: Vec<String> = lines.iter().take(rows).map(|line| (*line).to_owned()).collect();
    if lines.len() > rows
        && let Some(last) = shown.last_mut()
    {
        *last = format!("… {} more lines: --once prints them all", lines.len() - rows + 1);
    }
    format!("\x1b[H{}\x1b[K\x1b[J", shown.join("\x1b[K\n"))
}

/// The height of the terminal, in lines.
fn rows() -> usize {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ writes one winsize to the address given, and `size` is one.
    let known = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) } == 0 && size.ws_row > 0;
    if known { size.ws_row.into() } else { usize::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_takes_the_place_of_the_last_one_and_no_more_than_the_terminal() {
        assert_eq!(in_place("a\nb\n", 10), "\x1b[Ha\x1b[K\nb\x1b[K\x1b[J");
        assert_eq!(in_place("a\nb\nc\nd\n", 2), "\x1b[Ha\x1b[K\n… 3 more lines: --once prints them all\x1b[K\x1b[J");
        assert_eq!(in_place("a\nb", 2), "\x1b[Ha\x1b[K\nb\x1b[K\x1b[J");
    }
}
