//! `tidemill-kvpool`: one pool node.

fn main() {}
