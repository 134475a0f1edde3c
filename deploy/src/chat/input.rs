//! Questions from a terminal or a pipe. A line that ends in `\` continues on the next one.

use rustyline::{Behavior, Config, DefaultEditor, error::ReadlineError};
use std::io::{self, BufRead};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::spawn_blocking,
};

pub(super) enum Input {
    /// A line editor, with the questions so far under the arrow keys.
    Terminal(Box<DefaultEditor>),
    Pipe {
        lines: mpsc::Receiver<io::Result<String>>,
        interrupts: Signal,
    },
}

const PROMPT: &str = "\n> ";
const CONTINUED: &str = "… ";

impl Input {
    pub(super) fn terminal() -> Result<Self, ReadlineError> {
        // The editor uses the terminal even if answers are redirected to a file.
        let config = Config::builder().behavior(Behavior::PreferTerm).build();
        Ok(Self::Terminal(Box::new(DefaultEditor::with_config(config)?)))
    }

    pub(super) fn pipe() -> io::Result<Self> {
        Ok(Self::Pipe { lines: stdin_lines(), interrupts: signal(SignalKind::interrupt())? })
    }

    /// The next question, and the input from which to read the one after it. `None` at the end of the input.
    pub(super) async fn question(mut self) -> anyhow::Result<Option<(String, Self)>> {
        let mut question = String::new();
        let mut prompt = PROMPT;
        loop {
            let Some((line, input)) = self.line(prompt).await? else { return Ok(None) };
            self = input;
            match line.strip_suffix('\\') {
                Some(part) => {
                    question.extend([part, "\n"]);
                    prompt = CONTINUED;
                }
                None => {
                    question.push_str(&line);
                    return Ok(Some((question, self)));
                }
            }
        }
    }

    async fn line(self, prompt: &'static str) -> anyhow::Result<Option<(String, Self)>> {
        match self {
            Self::Terminal(mut editor) => {
                let (read, mut editor) = spawn_blocking(move || (editor.readline(prompt), editor)).await?;
                match read {
                    Ok(line) => {
                        editor.add_history_entry(&line)?;
                        Ok(Some((line, Self::Terminal(editor))))
                    }
                    Err(ReadlineError::Eof | ReadlineError::Interrupted) => Ok(None),
                    Err(error) => Err(error.into()),
                }
            }
            Self::Pipe { mut lines, mut interrupts } => {
                let line = tokio::select! {
                    line = lines.recv() => line.transpose()?,
                    _ = interrupts.recv() => None,
                };
                Ok(line.map(|line| (line, Self::Pipe { lines, interrupts })))
            }
        }
    }
}

/// Reads lines of stdin on a separate thread: the runtime's stdin would keep the process alive until one more line is entered.
fn stdin_lines() -> mpsc::Receiver<io::Result<String>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            if sender.blocking_send(line).is_err() {
                break;
            }
        }
    });
    receiver
}
