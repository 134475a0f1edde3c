//! `tidemill certs`: a cluster's CA, and certificates that state the role and name of their holders.

use std::path::PathBuf;
use tidemill_net::identity::{IdentityError, issue};

/// Make a cluster CA, and certificates for its processes.
#[derive(Clone, Debug, clap::Args)]
pub struct CertsArgs {
    /// Directory of the CA, ca.pem and ca.key; they are made if there are none
    pub dir: PathBuf,
    /// Roles and names to make certificates for, in directories of their own under DIR, such as coordinator/c1 kvpool/k1 prefill/p1
    /// decode/d1; they replace earlier ones, which running processes notice. Without any: one certificate in DIR itself that may act as
    /// anything, for trials on one machine
    #[arg(value_name = "ROLE/NAME")]
    pub names: Vec<String>,
    /// Days for which the certificates are valid
    #[arg(long, default_value_t = issue::DAYS)]
    pub days: u32,
}

pub fn certs(args: &CertsArgs) -> Result<(), IdentityError> {
    if args.names.is_empty() {
        return issue::create(&args.dir);
    }
    if !args.dir.join("ca.pem").exists() {
        issue::create_ca(&args.dir)?;
    }
    for name in &args.names {
        let (dir, name) = issue::issue(&args.dir, name, args.days)?;
        println!("{}\t{name}\tserial {}\tgood for {} days", dir.display(), name.serial, args.days);
    }
    Ok(())
}
