//! Chat templates, compiled and rendered in processes with limits: a template that takes too much of anything, or breaks its process, costs the
//! request, and another process goes on.
//!
//! ```text
//!   compute thread ── template, messages ──► a process of this program: limits of CPU time, memory and wall time
//!                  ◄──────── prompt ────────
//! ```
//!
//! A process serves one thread at a time, so there are as many as threads render at the same moment, and is started when it is needed. All
//! calls block.

use crate::text::template::{ChatTemplate, Confinement, Facts, OUTPUT_BYTES_MAX, TemplateError, TemplateText};
use parking_lot::{Mutex, RwLock};
use std::{
    fmt,
    io::{self, BufReader, ErrorKind},
    num::NonZero,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};
use tidemill_grammar::confinement::{self, CpuLimit, Process, limit_memory, read_frame, write_frame};

/// The first argument that makes a program such a process.
pub const ARGUMENT: &str = "template-helper";
/// The CPU time of one rendering, or of compiling one template.
pub const CPU_MAX: Duration = Duration::from_secs(1);
/// The memory of a process in addition to its program: a heap and a stack.
pub const MEMORY_BYTES: usize = 512 << 20;
/// The stack: values are as deep as clients' bodies may be, and templates call their macros.
const STACK_BYTES: usize = 16 << 20;
/// The longest wait for an answer, on an overloaded machine.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// The most bytes of a message: the longest prompt, or the messages for one.
const FRAME_BYTES_MAX: usize = OUTPUT_BYTES_MAX + (1 << 10);
/// The most bytes of a rendering after which its process is used again. What it has freed may still count as its memory.
const REUSED_BYTES_MAX: usize = 4 << 20;
const BUFFER_BYTES: usize = 64 << 10;

/// Kinds of messages to a process: a template to compile, or messages to render.
const LOAD: u8 = 0;
const RENDER: u8 = 1;
/// Kinds of answers: what was request for, or an error as JSON.
const DONE: u8 = 0;
const FAILED: u8 = 1;

/// The processes of one coordinator.
pub struct Templates {
    program: PathBuf,
    /// The templates of all models, as JSON.
    texts: RwLock<Vec<Arc<[u8]>>>,
    idle: Mutex<Vec<Renderer>>,
    idle_max: usize,
}

impl Templates {
    /// Prepares for processes of `program`, which must [be one](run) with [`ARGUMENT`] as its first argument.
    pub fn new(program: PathBuf) -> Self {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        // One for each compute thread.
        Self { program, texts: RwLock::default(), idle: Mutex::default(), idle_max: cores + 1 }
    }

    /// The process ids of the processes that wait for work, for tests.
    pub fn idle(&self) -> Vec<u32> {
        self.idle.lock().iter().map(|renderer| renderer.process.id()).collect()
    }

    fn ask(&self, template: usize, kind: u8, request: &[u8]) -> Result<Vec<u8>, TemplateError> {
        let unavailable = |error: io::Error| TemplateError::Unavailable(error.to_string());
        let idle = self.idle.lock().pop();
        let mut renderer = idle.map_or_else(|| Renderer::start(&self.program), Ok).map_err(unavailable)?;
        let answer = renderer.ask(template, kind, request, || Arc::clone(&self.texts.read()[template]));
        let mut answer = match answer {
            Ok(answer) => answer,
            Err(error) => return Err(renderer.failure(error)),
        };
        if request.len() + answer.len() <= REUSED_BYTES_MAX {
            let mut idle = self.idle.lock();
            if idle.len() < self.idle_max {
                idle.push(renderer);
            }
        }
        match answer.first() {
            Some(&DONE) => {
                answer.remove(0);
                Ok(answer)
            }
            _ => Err(serde_json::from_slice(answer.get(1..).unwrap_or_default()).unwrap_or_else(|error| unavailable(error.into()))),
        }
    }
}

impl fmt::Debug for Templates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Templates").field("program", &self.program).finish_non_exhaustive()
    }
}

impl Confinement for Templates {
    fn load(&self, text: TemplateText) -> Result<(usize, Facts), TemplateError> {
        let json = serde_json::to_vec(&text).map_err(|error| TemplateError::Refused(error.to_string()))?;
        let number = {
            let mut texts = self.texts.write();
            texts.push(json.into());
            texts.len() - 1
        };
        let facts = self.ask(number, LOAD, &[])?;
        let facts = serde_json::from_slice(&facts).map_err(|error| TemplateError::Unavailable(error.to_string()))?;
        Ok((number, facts))
    }

    fn render(&self, template: usize, request: &[u8]) -> Result<String, TemplateError> {
        if request.len() > FRAME_BYTES_MAX - FRAME_HEAD_BYTES {
            return Err(TemplateError::TooMuch);
        }
        let prompt = self.ask(template, RENDER, request).inspect_err(|error| {
            if let TemplateError::Unavailable(reason) = error {
                tracing::warn!(reason, "a chat template could not be rendered");
            }
        })?;
        String::from_utf8(prompt).map_err(|error| TemplateError::Unavailable(error.to_string()))
    }
}

/// A message's kind and template.
const FRAME_HEAD_BYTES: usize = 5;

/// A process, which serves one thread at a time.
struct Renderer {
    process: Process,
    answers: BufReader<UnixStream>,
    /// The templates that it has compiled, by number.
    templates: Vec<bool>,
}

impl Renderer {
    fn start(program: &Path) -> io::Result<Self> {
        let process = Process::start(program, ARGUMENT, ANSWER_MAX)?;
        let answers = BufReader::with_capacity(BUFFER_BYTES, process.socket.try_clone()?);
        Ok(Self { process, answers, templates: Vec::new() })
    }

    /// Asks, after it has told the process the template's text if that does not know it yet.
    fn ask(&mut self, template: usize, kind: u8, request: &[u8], text: impl FnOnce() -> Arc<[u8]>) -> io::Result<Vec<u8>> {
        let is_known = self.templates.get(template).copied().unwrap_or_default();
        if kind == RENDER && is_known {
            return self.exchange(RENDER, template, request);
        }
        let loaded = self.exchange(LOAD, template, &text())?;
        if loaded.first() != Some(&DONE) {
            return Ok(loaded);
        }
        self.templates.resize(self.templates.len().max(template + 1), false);
        self.templates[template] = true;
        if kind == LOAD { Ok(loaded) } else { self.exchange(RENDER, template, request) }
    }

    fn exchange(&mut self, kind: u8, template: usize, body: &[u8]) -> io::Result<Vec<u8>> {
        write_frame(&self.process.socket, &[&[kind], &(template as u32).to_le_bytes(), body], FRAME_BYTES_MAX)?;
        read_frame(&mut self.answers, FRAME_BYTES_MAX)?.ok_or_else(|| ErrorKind::UnexpectedEof.into())
    }

    /// The reason why there is no answer.
    fn failure(&mut self, error: io::Error) -> TemplateError {
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset if self.process.ended_by_itself() => {
                TemplateError::TooMuch
            }
            ErrorKind::WouldBlock | ErrorKind::TimedOut => TemplateError::Unavailable("there was no time for it".into()),
            _ => TemplateError::Unavailable(error.to_string()),
        }
    }
}

/// Compiles and renders, until the coordinator closes the socket that is this process's standard input.
pub fn run() -> io::Result<()> {
    let socket = confinement::socket()?;
    confinement::leave_signals_to_the_parent();
    let thread = thread::Builder::new().name("templates".into()).stack_size(STACK_BYTES).spawn(move || serve(&socket))?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("it has panicked")))
}

fn serve(socket: &UnixStream) -> io::Result<()> {
    limit_memory(MEMORY_BYTES)?;
    let mut cpu_limit = CpuLimit::new()?;
    let mut templates = Vec::new();
    let mut request = BufReader::with_capacity(BUFFER_BYTES, socket);
    while let Some(message) = read_frame(&mut request, FRAME_BYTES_MAX)? {
        cpu_limit.end_after(CPU_MAX)?;
        match answer(&mut templates, &message) {
            Ok(answer) => write_frame(socket, &[&[DONE], answer.as_bytes()], FRAME_BYTES_MAX)?,
            Err(error) => write_frame(socket, &[&[FAILED], &serde_json::to_vec(&error)?], FRAME_BYTES_MAX)?,
        }
    }
    Ok(())
}

fn answer(templates: &mut Vec<Option<ChatTemplate>>, message: &[u8]) -> Result<String, TemplateError> {
    let wrong = || TemplateError::Unavailable("the message was not understood".into());
    let (&[kind, ref number @ ..], body) = message.split_first_chunk::<FRAME_HEAD_BYTES>().ok_or_else(wrong)?;
    let number = u32::from_le_bytes(*number) as usize;
    match kind {
        LOAD => {
            let text: TemplateText = serde_json::from_slice(body).map_err(|error| TemplateError::Unavailable(error.to_string()))?;
            let template = text.compiled()?;
            let facts = serde_json::to_string(&template.facts()).map_err(|error| TemplateError::Unavailable(error.to_string()))?;
            if templates.len() <= number {
                templates.resize_with(number + 1, || None);
            }
            templates[number] = Some(template);
            Ok(facts)
        }
        _ => templates.get(number).and_then(Option::as_ref).ok_or_else(wrong)?.answer(body),
    }
}
