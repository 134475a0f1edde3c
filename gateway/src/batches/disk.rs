//! Files and batches in the data directory:
//!
//! ```text
//! files/ID.json      a file's record          files/ID.content   its contents
//! batches/ID.json    a batch's record         batches/ID.output, batches/ID.errors   its answers so far
//!                                             batches/ID.begun   its running requests, and those that ran when a process died
//! uploads/ID         a file that is being uploaded; leftovers belong to a process that ended
//! ```
//!
//! Records are written to a temporary file and renamed, so they are complete or absent. A file's contents are in place before its record.

use serde::{Serialize, de::DeserializeOwned};
use std::{
    ffi::OsStr,
    fs,
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use tokio::io::AsyncWriteExt;

const RECORD: &str = "json";
const CONTENT: &str = "content";
const OUTPUT: &str = "output";
const ERRORS: &str = "errors";
const BEGUN: &str = "begun";
const UNFINISHED: &str = "tmp";
/// The mode of files, which contain prompts and answers.
pub(super) const PRIVATE: u32 = 0o600;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    File,
    Batch,
}

#[derive(Debug)]
pub struct Disk {
    root: PathBuf,
}

impl Disk {
    pub fn open(root: PathBuf) -> io::Result<Self> {
        let disk = Self { root };
        for kind in [Kind::File, Kind::Batch] {
            private_dir(&disk.folder(kind))?;
        }
        match fs::remove_dir_all(disk.uploads()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => private_dir(&disk.uploads())?,
        }
        Ok(disk)
    }

    fn folder(&self, kind: Kind) -> PathBuf {
        self.root.join(match kind {
            Kind::File => "files",
            Kind::Batch => "batches",
        })
    }

    fn uploads(&self) -> PathBuf {
        self.root.join("uploads")
    }

    fn record(&self, kind: Kind, id: &str) -> PathBuf {
        self.folder(kind).join(id).with_extension(RECORD)
    }

    pub fn content(&self, id: &str) -> PathBuf {
        self.folder(Kind::File).join(id).with_extension(CONTENT)
    }

    /// A batch's answers so far: the good ones, or the others.
    pub fn journal(&self, id: &str, good: bool) -> PathBuf {
        self.folder(Kind::Batch).join(id).with_extension(if good { OUTPUT } else { ERRORS })
    }

    /// The path of the log of a batch's running requests.
    pub fn begun(&self, id: &str) -> PathBuf {
        self.folder(Kind::Batch).join(id).with_extension(BEGUN)
    }

    /// Loads all records. Those that cannot be read are left as they are, and logged.
    pub fn load<T: DeserializeOwned>(&self, kind: Kind) -> io::Result<Vec<T>> {
        let mut records = Vec::new();
        self.each(kind, |_, extension, path| {
            if extension == UNFINISHED {
                return fs::remove_file(path);
            }
            if extension == RECORD {
                match serde_json::from_slice(&fs::read(path)?) {
                    Ok(record) => records.push(record),
                    Err(error) => {
                        tracing::error!(path = %path.display(), %error, "could not read a record of files or batches; leaving it out")
                    }
                }
            }
            Ok(())
        })?;
        Ok(records)
    }

    pub async fn save(&self, kind: Kind, id: &str, record: &impl Serialize) -> io::Result<()> {
        let path = self.record(kind, id);
        let bytes = serde_json::to_vec(record)?;
        blocking(move || {
            let beside = path.with_extension(UNFINISHED);
            let mut file = fs::File::options().write(true).create(true).truncate(true).mode(PRIVATE).open(&beside)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            fs::rename(&beside, &path)?;
            sync_folder_of(&path)
        })
        .await
    }

    pub async fn upload(&self, id: &str) -> io::Result<Upload> {
        let path = self.uploads().join(id);
        let file = tokio::fs::File::options().write(true).create_new(true).mode(PRIVATE).open(&path).await?;
        Ok(Upload { id: id.to_owned(), path, content: self.content(id), file })
    }

    /// Turns a journal into a file's contents, if that was not done yet. Returns its size.
    pub async fn adopt(&self, journal: &Path, id: &str) -> io::Result<u64> {
        let (journal, content) = (journal.to_owned(), self.content(id));
        blocking(move || {
            if !content.try_exists()? {
                fs::File::open(&journal)?.sync_all()?;
                fs::rename(&journal, &content)?;
                sync_folder_of(&content)?;
            }
            Ok(fs::metadata(&content)?.len())
        })
        .await
    }

    /// Removes the record first: contents without a record are removed at the next start.
    pub async fn remove_file(&self, id: &str) -> io::Result<()> {
        let paths = [self.record(Kind::File, id), self.content(id)];
        blocking(move || paths.iter().try_for_each(|path| remove(path))).await
    }

    pub async fn remove_batch(&self, id: &str) -> io::Result<()> {
        let paths = [self.record(Kind::Batch, id), self.journal(id, true), self.journal(id, false), self.begun(id)];
        blocking(move || paths.iter().try_for_each(|path| remove(path))).await
    }

    pub async fn remove_journals(&self, id: &str) -> io::Result<()> {
        let paths = [self.journal(id, true), self.journal(id, false), self.begun(id)];
        blocking(move || paths.iter().try_for_each(|path| remove(path))).await
    }

    /// Removes contents without a record.
    pub(super) fn remove_contents_unless(&self, named: impl Fn(&str) -> bool) -> io::Result<()> {
        self.each(Kind::File, |id, extension, path| if extension == CONTENT && !named(id) { remove(path) } else { Ok(()) })
    }

    /// Removes the answers of batches that are over or gone.
    pub(super) fn remove_journals_unless(&self, open: impl Fn(&str) -> bool) -> io::Result<()> {
        let is_journal = |extension: &str| [OUTPUT, ERRORS, BEGUN].contains(&extension);
        self.each(Kind::Batch, |id, extension, path| if is_journal(extension) && !open(id) { remove(path) } else { Ok(()) })
    }

    /// Visits every file, with the two parts of its name.
    fn each(&self, kind: Kind, mut look: impl FnMut(&str, &str, &Path) -> io::Result<()>) -> io::Result<()> {
        for entry in fs::read_dir(self.folder(kind))? {
            let path = entry?.path();
            let part = |part: Option<&OsStr>| part.and_then(OsStr::to_str).unwrap_or_default().to_owned();
            look(&part(path.file_stem()), &part(path.extension()), &path)?;
        }
        Ok(())
    }
}

/// A file that is being uploaded.
#[derive(Debug)]
pub struct Upload {
    id: String,
    path: PathBuf,
    content: PathBuf,
    file: tokio::fs::File,
}

impl Upload {
    pub fn id(&self) -> &str {
        &self.id
    }

    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes).await
    }

    /// Moves the contents into place.
    pub async fn publish(mut self) -> io::Result<()> {
        self.file.flush().await?;
        self.file.sync_all().await?;
        let (path, content) = (self.path.clone(), self.content.clone());
        blocking(move || {
            fs::rename(path, &content)?;
            sync_folder_of(&content)
        })
        .await
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // After publishing, it is gone already.
        let _ = fs::remove_file(&self.path);
    }
}

/// Runs work that waits for a disk.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(io::Error::other("this has panicked: please report it as a bug")))
}

fn private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Syncs the folder of a path: only then is the name on disk.
fn sync_folder_of(path: &Path) -> io::Result<()> {
    fs::File::open(path.parent().expect("it lies in a folder"))?.sync_all()
}
