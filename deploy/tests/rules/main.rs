//! Promises of the repository about itself: dependency arrows, links in documents, generated pages, scripts.

mod arrows;
mod docs;
mod reference;
mod scripts;
