# One file, to which aws/, gcp/ and azure/ have links.

# A token from a command, for each call: one read at plan time would be stale before the nodes are there.
provider "helm" {
  kubernetes = {
    host                   = local.infrastructure.cluster_endpoint
    cluster_ca_certificate = local.infrastructure.cluster_ca_certificate
    exec                   = local.infrastructure.cluster_auth
  }
}

# `now` is there while the environment is not protected, and follows what is asked for; made or taken away it replaces nothing.
resource "terraform_data" "unprotected" {
  for_each = merge({ always = "" }, var.cluster.deletion_protection ? {} : { now = jsonencode(local.fixed) })

  input = each.value
}

resource "terraform_data" "fixed" {
  input = local.fixed
  lifecycle {
    ignore_changes = [input]
    # Made anew, with what is asked for then, by a change of `now`: one that comes when the protection is off already.
    replace_triggered_by = [terraform_data.unprotected]
    postcondition {
      condition = alltrue([for key, value in self.input : try(local.fixed[key], value) == value])
      error_message = join("; ", concat(
        [for key, value in self.input : "${key} is \"${value}\" and would become \"${local.fixed[key]}\"" if try(local.fixed[key], value) != value],
        ["this cannot be changed in place and would make the environment anew. If that is meant, first apply cluster.deletion_protection = false by itself"],
      ))
    }
  }
}
