//! Checks of the scripts.

use std::{fs, io::Read as _, os::unix::fs::PermissionsExt as _, path::Path};

use super::docs::{files_with, root};

/// A script without the permission fails only where something starts it by its name, which may be the last line of a long run.
#[test]
fn scripts_are_executable() {
    let is_closed = |path: &Path| {
        let mut start = [0; 2];
        let mut file = fs::File::open(root().join(path)).unwrap();
        file.read_exact(&mut start).is_ok() && start == *b"#!" && file.metadata().unwrap().permissions().mode() & 0o111 == 0
    };
    let closed: Vec<_> = files_with(|_| true).into_iter().filter(|path| is_closed(path)).collect();
    assert!(closed.is_empty(), "scripts that cannot be executed (`git update-index --chmod=+x`): {closed:?}");
}
